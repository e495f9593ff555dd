"""Triton kernels, a folder each: api, kernel, arg_specs and, if there is something to tune, tuning.json.

An `api` function takes `use_kernel`: run the Triton kernel, or the plain torch definition beside it.
"""
