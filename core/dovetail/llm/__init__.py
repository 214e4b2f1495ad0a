"""Offline use: the engine in this process."""

from dovetail.llm.engine import LLM
from dovetail.llm.runs import ChatOutput, ChatStream, Output

__all__ = ["LLM", "ChatOutput", "ChatStream", "Output"]
