"""Configuration dataclasses: one group of settings per file."""
