"""Define a broken model under data-parallel attention: Llama whose ranks do not add up what they attend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from mutant import Mutant
from mutants_model import SMALL
from sound_model import SoundSuite

from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.model import ModelInfo
from dovetail.types import Batch
from dovetail_models.dense import DenseModel


class Attends(SoundSuite):
    """Build the model without a fault, which offers data-parallel attention."""

    name = "llama"
    configs: ClassVar = {"plain": SMALL}
    model_class = DenseModel

    def describe(self, directory: Path) -> ModelInfo:
        info = super().describe(directory)
        return replace(info, offers=info.offers | {Feature.MODEL_DATA_ATTENTION})


class KeepsItsRows(DenseModel):
    def forward(self, batch: Batch) -> torch.Tensor:
        if batch.own is not None:
            batch.own = replace(batch.own, tp=SINGLE.tp)
        return super().forward(batch)


class DoesNotAddUpRows(Attends):
    model_class = KeepsItsRows


MUTANTS = [
    Mutant(
        "does not add up the rows of ranks", "test_ranks_attend_for_requests_of_their_own", DoesNotAddUpRows, Attends
    ),
]
