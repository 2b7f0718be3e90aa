"""Adapters for training loops of other libraries, which are imported only when an adapter is.

hugging_face   ThreePassTrainer, a transformers.Trainer
lightning      ThreePassCallback, for an existing LightningModule
loggers        where the figures of a run go: W&B, MLflow, or anything with one method
"""
