"""Attention of many query tokens per sequence over the paged cache, in large tiles."""
