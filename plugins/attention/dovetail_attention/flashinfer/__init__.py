"""Run FlashInfer's kernels (Ye et al., arXiv 2501.01005) over the paged KV pool."""
