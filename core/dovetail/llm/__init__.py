"""Run the engine in the caller's process, for offline use."""

from dovetail.llm.engine import LLM
from dovetail.llm.runs import ChatOutput, ChatStream, Output

__all__ = ["LLM", "ChatOutput", "ChatStream", "Output"]
