"""Chats: what is shown to the model, how its outputs are constrained, and how they are read. No torch."""
