"""Endpoints about the server itself: health, metrics, models, tokenizer, development."""
