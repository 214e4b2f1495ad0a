"""Logits processors that come with Dovetail."""
