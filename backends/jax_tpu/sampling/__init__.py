"""Sampling: its device half, and the host half that packs what it reads."""
