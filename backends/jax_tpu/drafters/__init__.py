"""Drafter models: their layers, their part of a step, their weights."""
