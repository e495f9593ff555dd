"""How matrices lie in the tensors of a checkpoint: layouts that several methods share."""
