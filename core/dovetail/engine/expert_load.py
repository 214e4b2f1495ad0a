"""Count the tokens that each expert of each layer has received (``metrics.expert_load``)."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import torch

from dovetail.engine.build import as_module
from dovetail.errors import ConfigError
from dovetail.layers.experts import Router

if TYPE_CHECKING:
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.types import Batch


class ExpertLoad:
    """Count the tokens of each expert of a model on its device. The host waits for the device only in ``read``.

    The routers keep what they have chosen, and ``add`` counts it after the forward pass, also within a captured graph:
    about five kernels for all layers. Tokens that pad a graph, and those of steps that answer no request, write their K and V to page 0, and
    are not counted.
    """

    def __init__(self, model: ModelArchitecture, page_size: int, device: torch.device) -> None:
        """Raises ``ConfigError`` if no layer of ``model`` has a ``Router``."""
        named = [(name, layer) for name, layer in as_module(model).named_modules() if isinstance(layer, Router)]
        if not named:
            raise ConfigError(
                f"metrics.expert_load is set, and no layer of {model.info.architecture} is a dovetail.layers.experts.Router, "
                "whose choices are counted; leave it out"
            )
        self._page_size = page_size
        self._routers = [router for _, router in named]
        self._layers = [_index(name, number) for number, (name, _) in enumerate(named)]
        self._sizes = [router.rule.num_experts for router in self._routers]
        starts = [0, *itertools.accumulate(self._sizes)]
        self._starts = torch.tensor(starts[:-1], device=device).view(-1, 1, 1)
        self._counts = torch.zeros(starts[-1], dtype=torch.int64, device=device)
        for router in self._routers:
            router.keeps = True

    def add(self, batch: Batch) -> None:
        """Count the experts of the tokens of ``batch``, whose forward pass was launched last. Its last layer may have
        computed the rows of ``batch.last`` only."""
        taken: list[torch.Tensor] = []
        for router in self._routers:
            assert router.chosen is not None, "every layer of a model computes in every step"
            taken.append(router.chosen)
            router.chosen = None
        start = 0
        for shape, group in itertools.groupby(taken, lambda ids: ids.shape):
            ids = torch.stack(list(group))
            end = start + len(ids)
            places = batch.out_loc
            if shape[0] != len(places):
                assert batch.last is not None
                places = batch.last.out_loc
            counted = (places >= self._page_size).long().view(1, -1, 1).expand(ids.shape)
            self._counts.scatter_add_(0, (ids + self._starts[start:end]).flatten(), counted.flatten())
            start = end

    def read(self) -> dict[int, list[int]]:
        """Return the number of tokens of each expert, by the index of the layer, and wait for the device."""
        parts = torch.split(self._counts.cpu(), self._sizes)
        return {layer: part.tolist() for layer, part in zip(self._layers, parts, strict=True)}


def _index(name: str, number: int) -> int:
    """Return the index of the layer with the module ``name``, such as ``layers.3.mlp.router``; without one, ``number``."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return number if found is None else int(found[1])
