"""Quantised checkpoints: their schemes, their configs, and the readers of each method."""
