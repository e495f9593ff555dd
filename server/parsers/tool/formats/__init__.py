"""Tool-call formats, grouped by their parser."""
