"""Declare the fields of chats that switch reasoning on and off, with the names of vLLM, SGLang, and other servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dovetail.api.body import ApiModel, Int32
from dovetail.errors import RequestError

Effort = (
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]
    | Annotated[float, Field(ge=0, le=0.99)]
    | None
)
"""Type of an effort: a word, or SGLang's number. ``none`` switches reasoning off."""


class ReasoningOptions(ApiModel):
    """Describe ``reasoning``, which SGLang accepts."""

    effort: Effort = None
    enabled: bool | None = None
    max_tokens: Int32 | None = Field(None, ge=0, description="The largest number of tokens of the reasoning.")


class ThinkingOptions(ApiModel):
    """Describe ``thinking`` as an object."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Int32 | None = Field(None, ge=0, description="The largest number of tokens of the reasoning.")


class ReasoningFields(ApiModel):
    """Declare how much the model reasons before it answers. Without them, the chat template decides."""

    reasoning_effort: Effort = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = Field(None, description="Variable of the chat template.")
    thinking: bool | ThinkingOptions | None = Field(None, description="Variable of the chat template.")

    thinking_budget: Int32 | None = Field(None, ge=0, description="The largest number of tokens of the reasoning.")

    def reasoning_budget(self) -> tuple[str, int | None]:
        """Return the largest number of tokens of the reasoning, or None, and the name of the field that sets it."""
        budgets = {
            "thinking_budget": self.thinking_budget,
            "thinking": self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOptions) else None,
            "reasoning": self.reasoning and self.reasoning.max_tokens,
        }
        return next(((name, budget) for name, budget in budgets.items() if budget is not None), ("", None))

    def reasoning_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template: ``enable_thinking``, ``thinking`` and ``reasoning_effort``. Raises
        ``RequestError`` if two fields contradict each other."""
        effort = self.reasoning_effort
        if effort is None and self.reasoning is not None:
            effort = self.reasoning.effort
        variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        on = self._switch()
        if on is None and effort is not None:
            on = effort != "none"
        return variables if on is None else {**variables, "enable_thinking": on, "thinking": on}

    def _switch(self) -> bool | None:
        switches = {
            "thinking": self.thinking.type != "disabled"
            if isinstance(self.thinking, ThinkingOptions)
            else self.thinking,
            "enable_thinking": self.enable_thinking,
            "reasoning": self.reasoning and self.reasoning.enabled,
        }
        given = {name: on for name, on in switches.items() if on is not None}
        if len(set(given.values())) > 1:
            raise RequestError(
                f"{' and '.join(given)} contradict each other; give one of them", param=next(iter(given))
            )
        return next(iter(given.values()), None)
