"""One file per endpoint family."""
