"""Put trained drafters beside the tiny model: `python -m tools.speculative.install --heads DIR --model core/dovetail/assets/tiny`.

Folders become folders of the model. The MTP layer goes into the model's own model.safetensors, in the place of one that is
there, and config.json counts it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

ASSETS = Path("core/dovetail/assets/tiny")
FOLDERS = ("eagle3", "dflash", "draft_model")


def merge_mtp(head: Path, model: Path) -> None:
    """Write the tensors of the file ``head`` into the checkpoint in the folder ``model``."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    behind = f"model.layers.{config['num_hidden_layers']}."
    layer, whole = load_file(head), load_file(model / "model.safetensors")
    strange = [name for name in layer if not name.startswith(behind)]
    if strange:
        raise ValueError(
            f"{head} holds {strange[0]}; a layer behind this model's is called {behind}*: train it for this model"
        )
    kept = {name: tensor for name, tensor in whole.items() if not name.startswith(behind)}
    save_file({**kept, **layer}, model / "model.safetensors", {"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def install(heads: Path, model: Path) -> None:
    """All that ``heads`` holds."""
    for name in FOLDERS:
        if (heads / name / "model.safetensors").exists():
            (model / name).mkdir(exist_ok=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(heads / name / file, model / name / file)
    if (heads / "mtp" / "model.safetensors").exists():
        merge_mtp(heads / "mtp" / "model.safetensors", model)


def main() -> None:
    """Read the command line and install."""
    parser = argparse.ArgumentParser(description="Put trained drafters beside the tiny model.")
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ASSETS)
    args = parser.parse_args()
    install(args.heads, args.model)


if __name__ == "__main__":
    main()
