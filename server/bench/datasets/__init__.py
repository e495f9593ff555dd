"""Datasets of prompts for benchmarks. Nothing here uses HTTP or an engine."""
