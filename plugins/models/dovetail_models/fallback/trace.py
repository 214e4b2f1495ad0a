"""Run a model of transformers once without memory and without numbers, and note how it attends.

What the model's own code gives to the attention interface is the only description of its attention that is sure to be
right: windows, scales, caps and sinks have other names in each config.json. A model that does something that the engine
cannot reproduce, such as a mask of its own, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dovetail.errors import ConfigError
from dovetail_models.fallback.attention import ATTRIBUTE
from dovetail_models.fallback.facts import AttentionFacts
from dovetail_models.fallback.model import ComputedBody
from dovetail_models.fallback.per_token import mixes_tokens, token_count
from dovetail_models.fallback.tree import ATTENTION, RequestedMask, body_of

KNOWN = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
    | {"position_embeddings", "is_causal", "layer_idx", "output_router_logits", "return_dict", "target_dtype"}
)
"""Arguments of the attention interface that change nothing in the steps of an engine."""


class AttentionTrace(TorchDispatchMode):
    """Note the attention calls of a model, and what it computes outside of them that depends on other tokens. Raises
    ``ConfigError`` for what an engine cannot reproduce."""

    def __init__(self, tree: PreTrainedModel) -> None:
        super().__init__()
        self.calls: dict[str, AttentionFacts] = {}
        self._tree = tree
        self._what = type(tree).__name__
        self._parameters = {id(parameter): name for name, parameter in tree.named_parameters()}
        self._counted: list[torch.Tensor] = []
        self._tokens = _tokens_for(tree)
        self._running: list[str] = []
        """The names of the modules that are running, the innermost one last."""
        for name, module in tree.named_modules():
            setattr(module, ATTRIBUTE, _TracedAttention(self, name, module))

    def run(self) -> tuple[AttentionFacts, ...]:
        """Return the attention layers in the order of their calls. Raises ``ConfigError``. Runs outside
        inference mode, in which torch dispatches other operations than those that are known to keep tokens apart."""
        hooks = [hook for name, module in self._tree.named_modules() for hook in self._follow(name, module)]
        try:
            with torch.inference_mode(False):
                return self._run()
        finally:
            for hook in hooks:
                hook.remove()

    def _follow(self, name: str, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        """Note when ``module`` runs, so that a refusal names it."""
        before = module.register_forward_pre_hook(lambda *_: self._running.append(name))
        return before, module.register_forward_hook(lambda *_: _drop_last(self._running))

    def _run(self) -> tuple[AttentionFacts, ...]:
        with torch.device("meta"):
            ids = torch.zeros(1, self._tokens, dtype=torch.int64)
            mask = torch.ones(1, self._tokens, dtype=torch.bool)
        try:
            with torch.no_grad(), self:
                masked = body_of(self._tree)(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
            traced, self.calls = self.calls, {}
            self._tree.config._attn_implementation = ATTENTION
            with torch.no_grad(), self:  # as steps will run it
                body_of(self._tree)(input_ids=ids, position_ids=ids, use_cache=False)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._what}: its code cannot run in an engine's steps, which know no values on the host and no cache of "
                f"transformers: {type(error).__name__}: {error}"
            ) from error
        if list(self.calls) != list(traced):
            raise ConfigError(f"{self._what}: the layers that attend depend on the mask")
        hidden = masked[0]
        if hidden.shape[:2] != (1, self._tokens):
            raise ConfigError(
                f"{self._what}: its body returns {list(hidden.shape)}; needed: a hidden state for each token"
            )
        self._run_head(masked[0])
        return tuple(traced.values())

    def _run_head(self, hidden: torch.Tensor) -> None:
        """Run the model's code for logits as steps do, with ``hidden`` in the place of its body. Raises ``ConfigError`` if that
        code needs more of the body than hidden states."""
        body, computed = body_of(self._tree), ComputedBody()
        computed.hidden = hidden
        setattr(self._tree, self._tree.base_model_prefix, computed)
        try:
            with torch.no_grad(), self:
                logits = self._tree(input_ids=None, use_cache=False).logits
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._what}: its code for logits needs more of its body than hidden states: {type(error).__name__}: {error}"
            ) from error
        finally:
            setattr(self._tree, self._tree.base_model_prefix, body)
        if logits.shape[:2] != (1, self._tokens):
            raise ConfigError(f"{self._what}: its head returns {list(logits.shape)}; needed: logits for each token")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch. Notice counters of the tokens of the step, which are not positions, and operations over tokens."""
        name = func.overloadpacket.__name__
        flat = [x for x in args if isinstance(x, torch.Tensor)]
        if any(x is counted for x in flat for counted in self._counted):
            raise ConfigError(
                f"{self._what} counts the tokens of a step itself ({name}) and does not use the positions that it is given"
            )
        result = func(*args, **(kwargs or {}))
        if mixes_tokens(func, args, kwargs or {}, result, self._tokens):
            where = (self._running or [""])[-1] or "its code"
            raise ConfigError(
                f"{self._what}: {where} computes {name} over the tokens of a step, outside of attention, or in a way that is not "
                "known to keep them apart"
            )
        if name == "arange" and isinstance(result, torch.Tensor) and result.shape == (self._tokens,):
            self._counted.append(result)
        return result

    def note(self, name: str, module: nn.Module, tensors: tuple[torch.Tensor, ...], mask: Any, given: Any) -> None:
        """Note an attention call of module ``name``."""
        q, k, v = tensors
        if name in self.calls:
            raise ConfigError(f"{self._what}: {name} attends several times in one pass")
        if q.shape[::2] != (1, self._tokens) or k.shape[::2] != (1, self._tokens) or k.shape[:3] != v.shape[:3]:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise ConfigError(
                f"{self._what}: {name} attends with q, k, v {shapes}; needed: [1, heads, tokens, head_dim]"
            )
        for key, value in given.items():
            if key not in KNOWN | WITHOUT_EFFECT and value is not None and value is not False:
                raise ConfigError(f"{self._what}: {name} gives {key} to attention, which the fallback does not compute")
        if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ConfigError(f"{self._what}: {name} does not attend causally")
        sinks = given.get("s_aux")
        scale = given.get("scaling")
        self.calls[name] = AttentionFacts(
            module=name,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            scale=q.shape[3] ** -0.5 if scale is None else float(scale),
            window=self._window(name, mask, given),
            soft_cap=given.get("softcap"),
            sinks=None if sinks is None else self._parameter(name, sinks),
        )

    def _parameter(self, name: str, sinks: torch.Tensor) -> str:
        found = self._parameters.get(id(sinks))
        if found is None or sinks.ndim != 1:
            raise ConfigError(
                f"{self._what}: {name} computes its attention sinks; implemented: a parameter of one number a head"
            )
        return found

    def _window(self, name: str, mask: Any, given: Mapping[str, Any]) -> int | None:
        """Return the window of a layer by the mask that it got, or by its argument if it got none."""
        window = given.get("sliding_window")
        if not isinstance(mask, RequestedMask):
            if isinstance(mask, torch.Tensor):
                raise ConfigError(f"{self._what}: {name} attends with a mask that the model computes")
            return window
        for candidate in dict.fromkeys((window, getattr(self._tree.config, "sliding_window", None), None)):
            if _is_window(mask, candidate):
                return candidate
        raise ConfigError(
            f"{self._what}: {name} attends with a mask that is neither causal nor a window before the query"
        )


def _tokens_for(tree: PreTrainedModel) -> int:
    """Return a number of tokens that is no size of ``tree``. Raises ``ConfigError`` if there is none."""
    shapes = [tensor.shape for tensor in (*tree.parameters(), *tree.buffers())]
    count = token_count(size for shape in shapes for size in shape)
    if count is None:
        raise ConfigError(f"{type(tree).__name__}: its sizes have too many prime factors to tell tokens from channels")
    return count


def _drop_last(names: list[str]) -> None:
    """Remove the last of ``names``. A hook that returns something would replace the result of its module."""
    names.pop()


class _TracedAttention:
    """Take the place of ``PagedAttention`` in a trace."""

    def __init__(self, trace: AttentionTrace, name: str, module: nn.Module) -> None:
        self._trace, self._name, self._module = trace, name, module

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, given: Any
    ) -> torch.Tensor:
        """Note the call, and return a tensor of the shape of its result."""
        self._trace.note(self._name, self._module, (query, key, value), mask, given)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _is_window(mask: RequestedMask, window: int | None) -> bool:
    """Return True if ``mask`` allows what a window of ``window`` tokens allows, or, with None, every earlier token."""
    size = window or 1 << 20
    queries = {0, 1, 7, size // 2, size - 1, size, size + 1, 3 * size + 5}
    for query in queries:
        keys = {
            0,
            1,
            query - size - 1,
            query - size,
            query - size + 1,
            query // 2,
            query - 1,
            query,
            query + 1,
            query + size,
        }
        for key in keys - {key for key in keys if key < 0}:
            expected = key <= query and (window is None or key > query - window)
            if bool(_call(mask.allows, query, key)) != expected:
                return False
    return True


def _call(function: Any, query: int, key: int) -> Any:
    zero, q, k = (torch.tensor(value, device="cpu") for value in (0, query, key))
    return function(zero, zero, q, k)
