"""Turn one request into the messages of its outputs, and token outputs back into text, for the server and the offline
``LLM``."""
