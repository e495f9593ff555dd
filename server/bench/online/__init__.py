"""`pagoda bench serve`: a client that loads a running server."""
