"""The token of each row: the best, or the best after noise."""
