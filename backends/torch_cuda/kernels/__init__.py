"""Triton kernels, a folder each: api, reference, kernel, arg_specs and, where there is something to tune, tuning.json.

An `api` function takes `use_kernel`: the Triton kernel, or the plain torch reference that defines it.
"""
