"""Compare two configs: their outputs, their speed, and how certain the difference is. ``dovetail ab`` runs it, ``online`` compares
arms inside one server."""
