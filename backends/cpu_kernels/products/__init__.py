"""LLVM IR of matrix products: bfloat16 and quantised weights, and which kernel serves a model."""
