"""Attention backends by vLLM's names; only the selected one is imported."""
