"""The Flax NNX decoder: layers, layout over devices, and the model as a function over arrays."""
