"""Mixers with recurrent state, a file per kind; `convolution` has what they share besides the kernels."""
