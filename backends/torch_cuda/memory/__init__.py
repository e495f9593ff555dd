"""GPU memory: the plan, the KV cache, weights in host memory, and memory that can be released."""
