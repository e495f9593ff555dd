"""Decoders with mixtures of experts chosen by sigmoid scores with a learned correction."""
