"""Read GGUF, the file format of llama.cpp: metadata, tensors in blocks, and what other packages need of them.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. ``reader`` parses files and maps their
tensors into memory without copying them; ``blocks`` dequantizes. ``reader`` imports no torch.
"""
