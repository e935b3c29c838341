"""Evaluation and decoding."""
