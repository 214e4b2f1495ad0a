"""Provide drafters: ``ngram``, ``draft_model``, ``eagle``, ``eagle3``, ``eagle3_tree``, ``mtp``, ``dflash``."""
