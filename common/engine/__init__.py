"""Requests, scheduler and paged KV cache: token ids and integers only."""
