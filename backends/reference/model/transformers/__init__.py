"""Models whose layers are transformers' code (--model-impl transformers)."""
