"""vLLM's own server tests as tables of requests."""
