"""Build the tree of modules of a model of transformers, without memory for its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dovetail.errors import ConfigError
from dovetail_models.fallback.attention import attend

ATTENTION = "dovetail"
"""The name of Dovetail's attention in transformers' interface. No masks are made for it."""
TRACED_ATTENTION = "dovetail_traced"
"""The name under which the same attention gets a ``RequestedMask``."""


class RequestedMask:
    """Hold the mask that a model asks transformers for: a function of a query's and a key's index. Models pass it to
    attention as they pass a tensor."""

    def __init__(self, mask_function: Any) -> None:
        self.allows = mask_function


def _requested_mask(*, mask_function: Any, **_: Any) -> RequestedMask:
    return RequestedMask(mask_function)


for _name in (ATTENTION, TRACED_ATTENTION):
    AttentionInterface.register(_name, attend)
AttentionMaskInterface.register(TRACED_ATTENTION, _requested_mask)


def causal_class(config: Mapping[str, Any]) -> type[PreTrainedModel]:
    """Return the class of transformers that implements config.json. Raises ``ConfigError`` if there is none, and if it
    does not let others compute its attention."""
    names = config.get("architectures") or []
    version = f"transformers {transformers.__version__}"
    found = [getattr(transformers, str(name), None) for name in names]
    classes = [one for one in found if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    if not classes:
        own = "; the checkpoint's own code (auto_map) is not run" if config.get("auto_map") else ""
        raise ConfigError(f"config.json has architectures {names}, which {version} does not implement{own}")
    found_class = classes[0]
    if found_class._is_stateful:
        raise ConfigError(f"{found_class.__name__} keeps a recurrent state, which the fallback does not compute")
    if not found_class._supports_attention_backend:
        raise ConfigError(
            f"{found_class.__name__} of {version} computes attention itself: it does not support transformers' attention "
            "interface (_supports_attention_backend)"
        )
    return found_class


def read_config(model_class: type[PreTrainedModel], config: Mapping[str, Any]) -> PreTrainedConfig:
    """Return config.json as ``model_class`` reads it. Raises ``ConfigError``."""
    given = {key: value for key, value in config.items() if key != "quantization_config"}
    assert model_class.config_class is not None
    try:
        read = model_class.config_class.from_dict(given)
    except Exception as error:
        raise ConfigError(f"config.json: {model_class.__name__} of transformers cannot read it: {error}") from error
    assert isinstance(read, PreTrainedConfig)
    if read.is_encoder_decoder:
        raise ConfigError(f"{model_class.__name__} has an encoder; implemented: models with a decoder only")
    return read


def new_tree(config: Mapping[str, Any], attention: str = ATTENTION) -> PreTrainedModel:
    """Return the model that config.json describes, all of whose parameters and buffers are on torch's device ``meta``.
    Raises ``ConfigError``."""
    model_class = causal_class(config)
    read = read_config(model_class, config)
    read._attn_implementation = attention
    try:
        with torch.device("meta"):
            tree = model_class(read)
    except Exception as error:
        raise ConfigError(
            f"{model_class.__name__} of transformers cannot be built from this config.json: {type(error).__name__}: {error}"
        ) from error
    for module in tree.modules():
        if getattr(getattr(module, "config", None), "pad_token_id", None) is not None:
            vars(module.config)["pad_token_id"] = None  # with one, models look for padding on the host
    return tree.eval()


def body_of(tree: PreTrainedModel) -> nn.Module:
    """Return the part of a model that computes hidden states, without the head. Raises ``ConfigError``."""
    body = getattr(tree, tree.base_model_prefix, None)
    if not isinstance(body, nn.Module):
        raise ConfigError(f"{type(tree).__name__} has no body {tree.base_model_prefix!r} apart from its head")
    return body


class TokenModules(NamedTuple):
    """Hold the names of the head and of the embedding of a model."""

    head: str
    embedding: str


def vocabulary_of(tree: PreTrainedModel) -> TokenModules:
    """Return the names of the modules that read and write tokens. Raises ``ConfigError`` if they are not those of torch."""
    found = []
    for module, expected in ((tree.get_output_embeddings(), nn.Linear), (tree.get_input_embeddings(), nn.Embedding)):
        if not isinstance(module, expected) or (expected is nn.Linear and type(module) is not expected):
            raise ConfigError(
                f"{type(tree).__name__} has {type(module).__name__} in the place of its embedding or head; implemented: "
                f"{expected.__name__}"
            )
        found.append(next(name for name, other in tree.named_modules() if other is module))
    return TokenModules(*found)


def embedding_scale(tree: PreTrainedModel) -> float:
    """Return the number by which the embedding of ``tree``, whose buffers are computed, multiplies the rows of its weight, in
    its dtype. Raises ``ConfigError`` if it does something else with them."""
    embedding = tree.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    if type(embedding) is nn.Embedding:
        return 1.0
    weight = embedding.weight
    buffers = list(embedding.buffers())
    device = buffers[0].device if buffers else torch.device("cpu")
    rows, results = torch.ones(2, weight.shape[1], dtype=weight.dtype, device=device), []
    rows[1] = torch.linspace(-3, 3, weight.shape[1])
    for row in rows:
        embedding.weight = nn.Parameter(row[None], requires_grad=False)
        with torch.no_grad():
            results.append(embedding(torch.zeros(1, dtype=torch.int64, device=device))[0])
    embedding.weight = weight
    scale = results[0][0].item()
    if not all(torch.equal(result, row * scale) for row, result in zip(rows, results, strict=True)):
        raise ConfigError(f"{type(embedding).__name__} does not look up embeddings and multiply them by one number")
    return scale


def use_parameters(tree: PreTrainedModel) -> None:
    """Make parameters of the buffers that checkpoints contain, so that they are loaded."""
    for module in tree.modules():
        for key in [key for key in module._buffers if key not in module._non_persistent_buffers_set]:
            buffer = module._buffers.pop(key)
            if buffer is not None:
                module.register_parameter(key, nn.Parameter(buffer, requires_grad=False))


def fix_frequencies(tree: PreTrainedModel, context_len: int) -> None:
    """Let rotary frequencies not depend on the positions of a step, because the keys of requests are shared and kept. Of
    longrope, the long factors apply to all requests if ``context_len`` is above the original context. Raises
    ``ConfigError`` for kinds that change with the length of a text."""
    for name, module in tree.named_modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, Mapping) and ({"dynamic", "longrope"} & set(kind.values())):
            raise ConfigError(
                f"config.json: {name} has rotary frequencies that depend on the length of a text, by type of layer "
                f"({dict(kind)}), which the fallback does not compute"
            )
        if kind == "longrope":
            own = module.config.rope_parameters  # pyright: ignore[reportAttributeAccessIssue]
            original = own["original_max_position_embeddings"]
            length = original + 1 if context_len > original else original
            frequencies, scaling = ROPE_INIT_FUNCTIONS["longrope"](module.config, None, seq_len=length)  # pyright: ignore
            module.inv_freq.copy_(frequencies)  # pyright: ignore[reportCallIssue]
            module.attention_scaling, module.rope_type = scaling, "default"  # pyright: ignore
        elif isinstance(kind, str) and "dynamic" in kind:
            raise ConfigError(
                f"config.json: rope_type is {kind!r}, whose frequencies depend on the length of a text; the fallback "
                "computes frequencies that are the same for all requests"
            )


def compute_buffers(tree: PreTrainedModel, device: torch.device) -> None:
    """Let transformers compute the buffers that no checkpoint contains, such as rotary frequencies, on ``device``. Raises
    ``ConfigError`` for a buffer that it does not compute."""
    for name, module in tree.named_modules():
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        own = [key for key in buffers if key in module._non_persistent_buffers_set]
        if not own:
            continue
        results: list[dict[str, torch.Tensor]] = []
        for value in (0, 1):
            for key in own:
                module._buffers[key] = torch.full_like(buffers[key], value, device=device)
            with torch.device(device), torch.no_grad():
                tree._init_weights(module)
            results.append({key: buffer for key in own if (buffer := module._buffers[key]) is not None})
        for key in own:
            if not torch.equal(*(result[key] for result in results)):
                raise ConfigError(f"{type(tree).__name__}: transformers does not compute the buffer {name}.{key} anew")


def constant_tensors(tree: PreTrainedModel) -> Iterator[str]:
    """Yield the names of tensors that modules have as plain attributes: nothing computes them for a device."""
    for name, module in tree.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}"
