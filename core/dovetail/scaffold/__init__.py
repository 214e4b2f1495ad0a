"""``dovetail plugins new``: a whole package with one part of a kind, which works as it is written."""

from dovetail.scaffold.names import Names, named
from dovetail.scaffold.package import render, write

__all__ = ["Names", "named", "render", "write"]
