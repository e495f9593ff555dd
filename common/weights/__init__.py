"""Checkpoints as streams of named arrays."""
