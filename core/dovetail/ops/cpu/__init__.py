"""Provide the kernels of a decoder step in C++, compiled on the machine on which they run; see ``kernels.kernels``."""
