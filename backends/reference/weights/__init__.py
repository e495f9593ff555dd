"""Weights: their parameters as a model computes with them, how they are packed, and the stream that is loaded."""
