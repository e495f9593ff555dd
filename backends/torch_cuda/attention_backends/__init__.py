"""Attention backends for prefill and mixed steps, by vLLM's names; only the selected one is imported."""
