"""The CUDA engines: Triton kernels and how they are launched."""
