"""Speculative decoding: proposers of drafts that need no device."""
