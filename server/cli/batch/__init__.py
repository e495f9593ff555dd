"""`pagoda run-batch` and its files."""
