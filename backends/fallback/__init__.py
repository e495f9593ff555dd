"""Models of the library transformers with attention over our paged KV cache, for the backends that run on torch."""
