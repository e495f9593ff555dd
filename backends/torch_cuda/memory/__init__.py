"""GPU memory: planning, the KV cache, weight offloading, and releasable memory (sleep mode)."""
