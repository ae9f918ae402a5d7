"""The engines on the CPU: C kernels for dense and for sparse gradients."""
