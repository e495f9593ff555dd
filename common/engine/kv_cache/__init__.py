"""The paged KV cache: specs, block pool, block hashes, and the manager that allocates blocks to requests."""
