"""Kernels of sampling: edits of logits, top-k and top-p, noise, log-probabilities."""
