"""Provide one Dovetail plugin of each kind, in as few lines as possible."""
