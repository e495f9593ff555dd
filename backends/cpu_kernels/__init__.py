"""Kernels for CPUs, generated for the processor by LLVM. They need llvmlite and know no model."""
