collect_ignore = ["deepspeed_script.py"]  # doctests import every module, and this one needs deepspeed
