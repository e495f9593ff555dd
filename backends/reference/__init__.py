"""The CPU backend in plain PyTorch."""
