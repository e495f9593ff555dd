"""Tensor-parallel ranks: their processes, shards and collectives. Importing the package imports no torch."""
