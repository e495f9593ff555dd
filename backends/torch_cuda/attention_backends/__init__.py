"""Attention of prefill and mixed steps by kernels of others, in place of our own: optional, asked for by name."""
