"""Reasoning (chain-of-thought) formats."""
