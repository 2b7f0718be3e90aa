"""Triton kernels, each with a plain path as fallback and oracle."""
