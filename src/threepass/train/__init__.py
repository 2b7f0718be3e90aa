"""Training on top of the engine: data, loop, checkpoints."""
