"""Ways to start the ranks of an engine, a process each."""
