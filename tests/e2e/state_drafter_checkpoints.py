"""Save small random models with states, each with a drafter that keeps keys and values of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafter_checkpoints
import mtp_dflash_checkpoints
from safetensors.torch import load_file, save_file
from state_models import VOCAB, save

GENERATED = 5
"""The number of tokens that models and drafters generate: drafts of random weights are right now and then."""
HIDDEN = 32


def limit_vocabulary(directory: Path) -> None:
    """Change a model that was saved: it generates the first ``GENERATED`` tokens only."""
    saved = load_file(directory / "model.safetensors")
    saved["lm_head.weight"][GENERATED:] = 0
    saved["lm_head.weight"][:GENERATED] *= 4
    save_file(saved, directory / "model.safetensors")


def with_mtp(directory: Path) -> None:
    """Save a Qwen3-Next with a layer that predicts a further token."""
    mtp_dflash_checkpoints.save_qwen3_next(directory, layer_types=["linear_attention", "full_attention"])
    limit_vocabulary(directory)


def beside(name: str, drafter: str) -> Callable[[Path], None]:
    """Return what saves the model ``name`` and, in its folder, a drafter."""

    def build(directory: Path) -> None:
        save(name, directory, **({"num_hidden_layers": 4} if name == "falcon_h1" else {}))
        limit_vocabulary(directory)
        if drafter == "dflash":
            mtp_dflash_checkpoints.save_dflash(directory / drafter, hidden=HIDDEN, head_dim=16, mask=VOCAB - 1)
        elif drafter == "eagle3":
            sizes: dict[str, Any] = {"hidden_size": HIDDEN, "draft_vocab_size": VOCAB, "max_position_embeddings": 512}
            sizes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            drafter_checkpoints.save_eagle3(directory / drafter, **sizes)
            limit_vocabulary(directory / drafter)
        else:
            drafter_checkpoints.save_target(directory / drafter, num_hidden_layers=3)
            limit_vocabulary(directory / drafter)

    return build


DRAFTERS: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "draft_model": (beside("qwen3_next", "draft_model"), {"kind": "draft_model", "chunk_size": 32}),
    "mtp": (with_mtp, {"kind": "mtp", "num_draft_tokens": 3}),
    "eagle3": (beside("qwen3_next", "eagle3"), {"kind": "eagle3"}),
    "dflash": (beside("qwen3_next", "dflash"), {"kind": "dflash"}),
    "draft_model of Kimi Linear": (beside("kimi_linear", "draft_model"), {"kind": "draft_model"}),
    "eagle3 of Falcon-H1": (beside("falcon_h1", "eagle3"), {"kind": "eagle3"}),
}
"""What saves each pair of a model and a drafter, and the drafter's settings."""
