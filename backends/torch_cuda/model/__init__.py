"""Mixers of the NVIDIA backend, a file per kind."""
