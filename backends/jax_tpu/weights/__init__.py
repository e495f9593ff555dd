"""Loading, converting and storing weights."""
