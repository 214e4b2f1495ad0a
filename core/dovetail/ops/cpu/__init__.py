"""Kernels of a decoder step in C++, compiled on the machine they run on; see ``kernels.kernels``."""
