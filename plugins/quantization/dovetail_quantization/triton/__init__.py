"""Provide the kernels of FP8 in Triton, for tensors on CUDA."""
