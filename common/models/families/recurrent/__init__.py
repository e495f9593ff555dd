"""Decoders with linear attention or state-space mixers."""
