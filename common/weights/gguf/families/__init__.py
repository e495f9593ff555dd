"""Rows of GGUF architectures by kind: `CONFIGS` (metadata to config) and `LAYOUTS` (tensors)."""
