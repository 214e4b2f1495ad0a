"""Compare configs: their outputs, their speed, and how certain the difference is. ``dovetail ab`` compares two configs offline, and
the package ``online`` compares the arms of one running server."""
