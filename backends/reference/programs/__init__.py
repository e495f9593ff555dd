"""The compiled kernels as torch operators, and small steps recorded as programs of kernel calls."""
