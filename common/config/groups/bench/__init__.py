"""Settings of the benchmark commands."""
