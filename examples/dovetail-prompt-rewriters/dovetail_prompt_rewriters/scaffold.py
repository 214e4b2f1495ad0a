"""Describe the package that ``dovetail plugins new prompt_rewriter NAME`` writes."""

from __future__ import annotations

from pathlib import Path

from dovetail.scaffold import KindTemplate
from dovetail_prompt_rewriters.kind import IDEMPOTENT

TEMPLATE = KindTemplate(
    Path(__file__).parent / "templates",
    module="rewriter",
    suffix="Rewriter",
    summary="Writes runs of spaces as one space.",
    about="A prompt rewriter for Dovetail: runs of spaces become one space.",
    offers=(IDEMPOTENT,),
    setting={"keep_lines": False},
)
