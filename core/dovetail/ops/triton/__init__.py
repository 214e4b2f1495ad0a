"""Provide kernels in Triton for tensors on CUDA. Only the ops import these modules, when they first get such a tensor;
``tuning`` contains data only and may be imported anywhere."""
