"""Optimizers, the train step, checkpoints and the training loop."""
