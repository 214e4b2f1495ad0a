"""Define the suite of a model without a fault, from which the suites of broken models derive. The reference is the same
model, which reads all tokens at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from dovetail.engine.build import as_module, build_model
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo
from dovetail.testing.model import ModelSuite, Reference


class SoundSuite(ModelSuite):
    """Build ``model_class``. The direct subclasses are the suites of models without a fault, those below them have one,
    and get checkpoints and the reference from the former."""

    model_class: ClassVar[type[Any]]

    def new_model(self, info: ModelInfo, dtype: torch.dtype = torch.float32, mesh: Mesh = SINGLE) -> ModelArchitecture:
        model = build_model(self.model_class, info, torch.device("cpu"), dtype, mesh)
        for parameter in as_module(model).parameters():
            parameter.fill_(float("nan"))
        return model

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        ModelSuite.write_checkpoint(self._sound(), config, directory)

    def reference(self, directory: Path) -> Reference:
        sound = self._sound()
        model = sound.load(directory)
        return lambda tokens: sound.logits(model, tokens, len(tokens))

    def _sound(self) -> SoundSuite:
        return next(cls for cls in type(self).__mro__ if SoundSuite in cls.__bases__)()
