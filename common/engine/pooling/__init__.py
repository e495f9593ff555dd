"""Pooling models in the engine: their values and their scheduler."""
