"""The passes: Algorithm 1 on a tape, its gradients, options and ranks."""
