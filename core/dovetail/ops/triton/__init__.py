"""Kernels in Triton for tensors on CUDA. Imported by the ops when they first see such a tensor, and by nothing else; but for
``tuning``, which is data."""
