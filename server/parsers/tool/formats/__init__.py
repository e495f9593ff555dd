"""Tool-call formats, grouped by the machine that parses them."""
