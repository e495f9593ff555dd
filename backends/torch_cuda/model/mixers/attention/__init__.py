"""Grouped-query attention on a rank: over the paged cache, within prompts, and to selected blocks."""
