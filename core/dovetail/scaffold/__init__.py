"""Write a whole package with one component of a kind, which works as it is: ``dovetail plugins new``."""

from dovetail.scaffold.kinds import KindTemplate
from dovetail.scaffold.names import Names, named
from dovetail.scaffold.package import render, write

__all__ = ["KindTemplate", "Names", "named", "render", "write"]
