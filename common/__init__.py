"""The hardware-neutral engine: no jax, torch, transformers or web framework in here."""
