"""Decoders whose feed-forward blocks are mixtures of experts."""
