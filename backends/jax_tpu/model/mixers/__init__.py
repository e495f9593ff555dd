"""Mixers of the TPU backend, a file per kind; `convolution` has what recurrent ones share besides the kernels."""
