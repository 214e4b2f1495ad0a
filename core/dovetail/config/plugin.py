"""The base of every plugin's config section, and how a section selects components."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, SerializeAsAny


class Section(BaseModel):
    """A frozen section that knows all its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class PluginConfig(Section):
    """A component's own settings. Subclasses narrow ``kind`` to ``Literal["name"] = "name"`` and add their fields, each
    with a default, so that the bare name selects the component."""

    kind: str


class Selection(Section):
    """What a plugin section asks for: nothing (``none``), anything (``auto``), or candidates in order of preference.

    In config: ``auto``, ``none`` (optional kinds only), ``name``, ``{kind: name, ...}``, or a list of the last two.
    """

    disabled: bool = False
    candidates: tuple[SerializeAsAny[PluginConfig], ...] = ()

    @property
    def is_auto(self) -> bool:
        """True if the resolver may choose among all installed components."""
        return not self.disabled and not self.candidates


class AttentionSelection(Section):
    """Attention may differ by phase: a batch with extend rows uses ``prefill``, all others ``decode``.

    In config: any form of ``Selection`` for both, or ``{prefill: ..., decode: ...}``.
    """

    prefill: Selection = Selection()
    decode: Selection = Selection()
