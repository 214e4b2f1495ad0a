"""Render pages from templates, each as one file without external resources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape


def render(template: Path, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    """Render the template with ``values``. A name that is not among them is an error."""
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(values)
