"""Top-k, top-p and min-p as one threshold per row, found without a sort."""
