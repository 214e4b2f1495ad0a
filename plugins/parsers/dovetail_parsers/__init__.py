"""Provide the tool parsers ``hermes``, ``llama3_json``, ``mistral``, ``deepseek``, ``pythonic`` and ``gpt_oss``, and
the reasoning parsers ``deepseek_r1``, ``qwen3`` and ``gpt_oss``."""
