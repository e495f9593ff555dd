"""What every kernel is written with: LLVM IR as text, loops and vectors, matrix tiles, and the compiler."""
