"""LLVM IR of attention over the paged cache: vectors, pairs of bfloat16 numbers, matrix tiles."""
