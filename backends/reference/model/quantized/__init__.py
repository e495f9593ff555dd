"""Linear layers and tables over quantised weights, which stay as the checkpoint holds them."""
