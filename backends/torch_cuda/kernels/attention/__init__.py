"""Attention kernels: decode, prefill, latents, sparse selections, and the rotary cache write."""
