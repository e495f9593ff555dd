"""One file per kind of block: how the configs of its families are read and their tensors are named."""
