"""The NVIDIA backend: PyTorch with own Triton kernels and CUDA graphs."""
