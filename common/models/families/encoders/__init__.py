"""Bidirectional encoders, which only pool."""
