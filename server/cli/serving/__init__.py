"""`pagoda serve`: one or several API server processes, and signals."""
