"""Rewrite prompts: a kind of component that Dovetail itself does not have."""
