"""Install trained drafters in the folder of the tiny model.

Run: `python -m tools.speculative.install --heads DIR --model core/dovetail/assets/tiny`.

Folders of drafters are copied into the model's folder. The MTP layer is merged into the model's model.safetensors,
where it replaces an existing one, and config.json counts it.
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
    others = [name for name in layer if not name.startswith(behind)]
    if others:
        raise ValueError(
            f"{head} contains {others[0]}; the names of a layer after this model's layers begin with {behind}: train it for this model"
        )
    kept = {name: tensor for name, tensor in whole.items() if not name.startswith(behind)}
    save_file({**kept, **layer}, model / "model.safetensors", {"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (model / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def install(heads: Path, model: Path) -> None:
    """Install all drafters in the folder ``heads`` into the model's folder."""
    for name in FOLDERS:
        if (heads / name / "model.safetensors").exists():
            (model / name).mkdir(exist_ok=True)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(heads / name / file, model / name / file)
    if (heads / "mtp" / "model.safetensors").exists():
        merge_mtp(heads / "mtp" / "model.safetensors", model)


def main() -> None:
    """Read the command line and install."""
    parser = argparse.ArgumentParser(description="Install trained drafters in the folder of the tiny model.")
    parser.add_argument("--heads", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ASSETS)
    args = parser.parse_args()
    install(args.heads, args.model)


if __name__ == "__main__":
    main()
