"""Sequence mixers."""
