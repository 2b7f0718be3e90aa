"""Formats of numbers: what half precision needs, stochastic rounding, and many small tensors as one."""
