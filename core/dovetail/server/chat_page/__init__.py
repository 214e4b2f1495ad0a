"""Serve the page at /: a chat with the served model in a browser. It has no build step and loads nothing from elsewhere."""
