"""Attention of few query tokens per sequence over the paged cache, each sequence cut into parts."""
