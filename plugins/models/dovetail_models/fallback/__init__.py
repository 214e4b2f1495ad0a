"""Run an architecture that has no file of its own through transformers' modules, with Dovetail's attention, KV pool and
linear layers. Only ``describe`` can be imported without torch, and only what a checkpoint needs imports transformers."""
