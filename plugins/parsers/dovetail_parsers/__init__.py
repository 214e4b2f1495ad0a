"""Tool parsers ``hermes``, ``llama3_json``, ``mistral``, ``deepseek``, ``pythonic`` and ``gpt_oss``; reasoning parsers
``deepseek_r1``, ``qwen3`` and ``gpt_oss``."""
