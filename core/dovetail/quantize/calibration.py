"""Round the weights of a model by GPTQ with the activations of calibration texts. transformers runs the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.ops.integers import Integers, dequantize
from dovetail.quantize.gptq import gptq
from dovetail.quantize.schemes import Rounding, WritingScheme
from dovetail.quantize.writer import QuantizeJob, RoundingOf, check_job

MAX_TOKENS = 2048
"""The number of tokens of a text that are used."""
_LAYER = re.compile(r"(.*\.\d+)\.")


class _Reached(Exception):
    """Report that the next layer was reached."""


@torch.no_grad()
def calibrated(job: QuantizeJob, texts: Path) -> RoundingOf:
    """Return how the weights of a job are rounded: by GPTQ, layer after layer, with the inputs that each layer gets for
    ``texts`` (one on each line) when the layers before are quantized. Raises ``ConfigError``."""
    if job.scheme.kind == "fp8":
        raise ConfigError("--calibration is given with --scheme fp8; allowed: int8, w8a16, int4")
    names = check_job(job)
    model, rows = _model(job.source, texts)
    modules: dict[str, nn.Linear] = {}
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            module = None
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"{name} is no linear layer of transformers' model; implemented with --calibration: models without experts"
            )
        modules[name] = module
    layers: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.match(name)
        layers.setdefault(found[1] if found else name, []).append(name)
    made: dict[str, Integers] = {}
    order = list(layers.values())
    for own, following in zip(order, [*order[1:], []], strict=True):
        hessians = _hessians(model, rows, {name: modules[name] for name in own}, [modules[name] for name in following])
        for name in own:
            made[name] = _rounded(modules[name].weight, hessians.pop(name), job.scheme)
            weight = modules[name].weight
            weight.copy_(dequantize(made[name], torch.float32))
            made[name] = Integers(*(None if part is None else part.cpu() for part in made[name]))  # pyright: ignore[reportArgumentType]
    return lambda name: _as_rounding(made[name])


def _as_rounding(found: Integers) -> Rounding:
    return lambda weight, bits, group, symmetric: found


def _rounded(weight: torch.Tensor, hessian: torch.Tensor, scheme: WritingScheme) -> Integers:
    group = scheme.group if scheme.packed and scheme.group else weight.shape[1]
    return gptq(weight, hessian, scheme.bits, group, symmetric=scheme.symmetric, dtype=weight.dtype)


def _model(source: Path, texts: Path) -> tuple[Any, list[torch.Tensor]]:
    """Return transformers' model and the tokens of each text."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("--calibration needs transformers: pip install transformers") from None
    try:
        lines = [line for line in texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {texts} cannot be read as text: {error}") from error
    if not lines:
        raise ConfigError(f"--calibration {texts} has no text; allowed: a text on each line")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibration needs a checkpoint that transformers can load: {error}") from error
    ids = [tokenizer(line)["input_ids"][:MAX_TOKENS] for line in lines]
    if not any(ids):
        raise ConfigError(f"--calibration {texts} has no tokens; allowed: a text on each line")
    return model.eval().to(device), [torch.tensor([row], device=device) for row in ids if row]


def _hessians(
    model: Any, rows: Sequence[torch.Tensor], modules: dict[str, nn.Linear], following: Sequence[nn.Linear]
) -> dict[str, torch.Tensor]:
    """Return the sums of ``x.T @ x`` over the inputs of ``modules``. A forward pass ends where one of ``following`` begins."""
    sums = {name: torch.zeros(m.in_features, m.in_features, device=m.weight.device) for name, m in modules.items()}

    def adding(name: str) -> Any:
        def add(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            sums[name].addmm_(x.T, x)

        return add

    def stop(module: nn.Module, inputs: object) -> None:
        raise _Reached

    hooks = [module.register_forward_pre_hook(adding(name)) for name, module in modules.items()]
    hooks += [module.register_forward_pre_hook(stop) for module in following]
    try:
        for row in rows:
            try:
                model(row, use_cache=False)
            except _Reached:
                continue
    finally:
        for hook in hooks:
            hook.remove()
    return sums
