"""Embeddings, classification, scoring and pooling."""
