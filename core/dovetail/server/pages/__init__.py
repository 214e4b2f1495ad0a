"""Serve the pages for a browser: a chat with the served model at /, and the list of routes at /docs. They need no build step and
load nothing from other servers."""
