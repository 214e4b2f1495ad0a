"""The page at /: a chat with the served model in a browser. No build step, nothing from outside."""
