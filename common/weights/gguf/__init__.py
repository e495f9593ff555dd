"""GGUF files: metadata, quantised blocks, and both as a Hugging Face checkpoint."""
