"""Run FlashAttention (Dao et al., arXiv 2205.14135, 2307.08691, 2407.08608) over the paged KV pool."""
