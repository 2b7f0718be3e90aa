"""Operations of the three passes as kernels of our own, each with a plain PyTorch twin."""
