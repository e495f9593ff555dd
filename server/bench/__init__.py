"""`pagoda bench`: benchmarks of the engine and of a running server."""
