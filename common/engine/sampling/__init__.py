"""Sampling: the rules of a request, the state of a step's rows, edits of logits, and logits processors."""
