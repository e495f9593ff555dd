"""One file per mixer kind."""
