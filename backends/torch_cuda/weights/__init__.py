"""Weights of a rank: loading into fused and sharded tensors, and the layouts of quantised matrices."""
