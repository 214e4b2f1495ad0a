"""Turn text into tokens and back: tokenizer.json, chat templates, incremental detokenization with stop strings. No
torch."""

from dovetail.tokenizer.content import MarkedPrompt
from dovetail.tokenizer.detokenizer import IncrementalDetokenizer
from dovetail.tokenizer.tokenizer import Tokenizer, load_tokenizer

__all__ = ["IncrementalDetokenizer", "MarkedPrompt", "Tokenizer", "load_tokenizer"]
