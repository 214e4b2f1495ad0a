"""Let the components of third-party kinds change prompts before they are tokenized, in a server and in an ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.errors import PluginError, RequestError
from dovetail.interfaces.prompts import PromptContext, PromptDraft
from dovetail.registry.resolution import reported

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.registry.installed import Registry

HOOK = "on_prompt"


class PromptHooks:
    """Call the hook ``on_prompt`` of every plugin with each prompt and with the components that the plugin may use.

    ``parts`` are the built components by kind. May be called from several threads if the plugins allow it.
    """

    def __init__(self, registry: Registry | None = None, parts: Mapping[str, Sequence[Any]] | None = None) -> None:
        hook = getattr(registry.hooks, HOOK) if registry is not None else None
        self._hook = hook if hook is not None and hook.get_hookimpls() else None
        self._parts = parts or {}

    def text(self, text: str) -> str:
        """Return the text to tokenize instead of ``text``. Raises ``RequestError`` if a plugin refuses the prompt."""
        if self._hook is None:
            return text
        changed = self._call(PromptDraft(text=text)).text
        if not isinstance(changed, str):
            raise PluginError(f"a plugin's {HOOK} set the text of a prompt to {changed!r:.80}; allowed: a text")
        return changed

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages to render instead of ``messages``. Raises ``RequestError`` if a plugin refuses them."""
        if self._hook is None:
            return messages
        changed = self._call(PromptDraft(messages=messages)).messages
        if changed is None:
            raise PluginError(f"a plugin's {HOOK} set the messages of a chat to None; allowed: a list")
        return changed

    def _call(self, prompt: PromptDraft) -> PromptDraft:
        assert self._hook is not None
        try:
            self._hook(prompt=prompt, parts=self._parts)
        except (RequestError, PluginError):
            raise
        except Exception as error:
            raise PluginError(f"a plugin's {HOOK} raised {type(error).__name__}: {error}") from error
        return prompt


def load_prompt_hooks(info: Mapping[str, Any], config: Config, registry: Registry) -> PromptHooks:
    """Build the components that act on prompts and that the engine has chosen. ``info`` is the engine's info
    (``EngineReady.info``). Raises ``PluginError``."""
    context = PromptContext(config)
    parts = {
        str(descriptor.kind): [
            chosen.build(context) for chosen in reported(info["resolved"], descriptor.kind, config, registry)
        ]
        for descriptor in registry.kinds
        if descriptor.for_prompts
    }
    return PromptHooks(registry, parts)
