"""The reproduction of the paper: what it claims, what is run for it, what came out, and the page that says so.

paper.py     the paper's own numbers
plan.py      the studies, as lists of training runs
records.py   results/paper/STUDY.json: what every finished run left
runner.py    trains what is missing, and stops in time
measure.py   what is measured on a trained net besides its history
verdicts.py  the rules by which records confirm or refute a claim
page.py      docs/claims.md and its figures, from the records alone
"""
