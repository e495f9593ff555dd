"""Grouped-query attention: over the paged cache, within prompts, and to selected blocks."""
