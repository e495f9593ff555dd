"""Kernels of the CPU backend, generated for the processor by LLVM. They need llvmlite; torch's operators do without."""
