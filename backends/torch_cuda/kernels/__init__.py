"""Triton kernels, a folder each: entry points and plain torch definitions in `__init__`, the kernel with its
ahead-of-time launches in `kernel`, and tuning.json where block sizes matter.

An entry point takes `use_kernel`: run the Triton kernel, or the plain torch definition beside it.
"""
