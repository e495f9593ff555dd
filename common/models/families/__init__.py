"""One file per model family: how its config is read and its tensors are named."""
