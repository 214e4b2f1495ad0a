"""Provide what API plugins are built from.

``body`` reads and validates requests, ``requests`` and ``sampling`` hold the fields that most APIs have in common,
``responses`` sends complete and streamed responses, ``problems`` describes errors, ``meta`` formats outputs as SGLang's
API does, and ``embeddings`` cuts, normalises and compares vectors.
"""
