"""Train the tiny model: `python -m tools.tiny.train --data DATA --out core/dovetail/assets/tiny --minutes 6.5`.

DATA is a folder that make_data.py has filled or is filling. Training stops by the clock: the learning rate is constant
for the first part of the time and then falls linearly to zero. Writes model.safetensors (bf16), config.json,
generation_config.json and training.json (what was done and the loss).
"""

import argparse
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tools.tiny.make_data import FIRST, ID_MASK, LEARN
from tools.tiny.model import Packed, Tiny, TinyConfig
from tools.tiny.muon import Muon
from torch import Tensor

log = logging.getLogger("tiny.train")
MAX_DOCUMENTS_PER_TOKEN = 1 / 64
WARMUP, HOLD = 0.02, 0.35
"""Fractions of the training time: the learning rate rises until WARMUP and falls from HOLD on."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold the settings of the command line."""

    data: Path
    out: Path
    minutes: float
    batch_tokens: int
    rate: float
    prompt_weight: float
    seed: int
    compile: bool
    init: Path | None
    save_seconds: float


class Batch:
    """Hold one batch on the host. Its shapes are fixed, so that the step is compiled only once."""

    def __init__(self, tokens: np.ndarray, prompt_weight: float, rng: np.random.Generator) -> None:
        size = len(tokens) - 1
        ids = (tokens & ID_MASK).astype(np.int64)
        starts = np.flatnonzero(tokens[:size] & FIRST)
        starts = starts if len(starts) and starts[0] == 0 else np.concatenate(([0], starts))
        bounds = np.full(int(size * MAX_DOCUMENTS_PER_TOKEN), size, np.int32)
        bounds[: len(starts)] = starts
        positions = np.arange(size) - np.repeat(starts, np.diff(np.append(starts, size)))
        learn = (tokens[1:] & LEARN) > 0
        inside = (tokens[1:] & FIRST) == 0
        picked, weights = _pick(learn, inside, size // 2, prompt_weight, rng)
        self.arrays = (ids[:-1], np.minimum(positions, 2047), bounds, picked, ids[1:][picked], weights)

    def to(self, device: torch.device) -> tuple[Tensor, Packed, Tensor, Tensor, Tensor]:
        """Return the arguments of Tiny.forward."""
        tensors = [torch.from_numpy(array) for array in self.arrays]
        if device.type == "cuda":
            tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        ids, positions, bounds, picked, targets, weights = tensors
        return ids, Packed(positions, bounds), picked, targets, weights


def _pick(
    learn: np.ndarray, inside: np.ndarray, size: int, prompt_weight: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return `size` positions and their weights: positions to learn have weight 1, and random prompt positions of a
    small weight fill the rest."""
    wanted = np.flatnonzero(learn & inside)[:size]
    rest = np.flatnonzero(~learn & inside)
    filler = rng.choice(rest, size - len(wanted), replace=len(rest) < size - len(wanted))
    weights = np.concatenate(
        (np.ones(len(wanted)), np.full(len(filler), prompt_weight * len(rest) / max(len(filler), 1)))
    )
    return np.concatenate((wanted, filler)), weights.astype(np.float32)


def chunks(folder: Path, size: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield runs of size + 1 tokens without end: new shards first, then old ones again in a new order."""
    seen: set[Path] = set()
    waited, queue = 0.0, []
    while True:
        if not queue:
            queue = sorted(set(folder.glob("shard-*.npy")) - seen)
            queue = queue or [path for path in sorted(seen) if rng.random() < 0.5]
            rng.shuffle(queue)
        if not queue:
            if waited > 300:
                raise ValueError(f"{folder} holds no shard-*.npy: run tools.tiny.make_data first")
            time.sleep(1)
            waited += 1
            continue
        path = queue.pop()
        seen.add(path)
        shard = np.load(path)
        for start in rng.permutation(np.arange(0, len(shard) - size, size)):
            yield shard[start : start + size + 1]


def prefetch(settings: Settings) -> "Queue[Batch]":
    """Prepare batches in a thread."""
    queue: Queue[Batch] = Queue(maxsize=16)
    rng = np.random.default_rng(settings.seed)

    def fill() -> None:
        for tokens in chunks(settings.data, settings.batch_tokens, rng):
            queue.put(Batch(tokens, settings.prompt_weight, rng))

    Thread(target=fill, daemon=True).start()
    return queue


def rate_at(progress: float) -> float:
    """Return the share of the peak learning rate at the fraction `progress` (0 to 1) of the training time."""
    if progress < WARMUP:
        return progress / WARMUP
    return min(1.0, max(0.0, (1 - progress) / (1 - HOLD)))


class Trainer:
    """Train the model with two optimizers: Muon for the matrices of the layers, AdamW for embedding and norms."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        torch.manual_seed(settings.seed)
        torch.set_float32_matmul_precision("high")
        self.model = Tiny(TinyConfig()).to(device)
        if settings.init:
            self.model.load_state_dict({k: v.float() for k, v in load_file(settings.init).items()})
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.model.named_parameters() if p.ndim == 1 or "embed" in name]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others, lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.loss = torch.compile(self.model, dynamic=False) if settings.compile else self.model
        self.device, self.rate = device, settings.rate

    def step(self, batch: Batch, progress: float) -> Tensor:
        """Run one update and return the loss, still on the device."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss(*batch.to(self.device))
        loss.backward()
        rate = self.rate * rate_at(progress)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.muon.step(rate)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return loss.detach()

    def save(self, out: Path) -> None:
        """Write the weights in bf16 with the two config files."""
        out.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().bfloat16().cpu().contiguous() for name, p in self.model.named_parameters()}
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        write_json(out / "config.json", TinyConfig().to_hf())
        write_json(out / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON for people to read."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def run(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Train until the time is over. The time starts after the first step, which compiles."""
    trainer, queue = Trainer(settings, device), prefetch(settings)
    trainer.step(queue.get(), 0.0).item()
    began = saved = time.monotonic()
    step, losses, history, waited = 0, [], [], 0.0
    while (progress := (time.monotonic() - began) / (settings.minutes * 60)) < 1:
        asked = time.monotonic()
        batch = queue.get()
        waited += time.monotonic() - asked
        losses.append(trainer.step(batch, progress))
        step += 1
        if step % 100 == 0:
            loss = torch.stack(losses).mean().item()
            losses = []
            seconds = time.monotonic() - began
            history.append({"step": step, "seconds": round(seconds, 1), "loss": round(loss, 4)})
            speed = step * settings.batch_tokens / seconds / 1e6
            log.info("step %d  %.0f s  loss %.4f  %.2f M tokens/s  waited %.1f s", step, seconds, loss, speed, waited)
            if time.monotonic() - saved > settings.save_seconds:
                trainer.save(settings.out)
                saved = time.monotonic()
    trainer.save(settings.out)
    return {
        "steps": step, "tokens": step * settings.batch_tokens, "minutes": settings.minutes, "rate": settings.rate,
        "batch_tokens": settings.batch_tokens, "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__, "shards": len(list(settings.data.glob("shard-*.npy"))), "history": history,
    }  # fmt: skip


def parse() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.5)
    parser.add_argument("--batch-tokens", type=int, default=131072)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--prompt-weight", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--init", type=Path, help="weights to start from")
    parser.add_argument("--save-seconds", type=float, default=90)
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Train and write everything."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = parse()
    report = run(settings, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    write_json(settings.out / "training.json", report)


if __name__ == "__main__":
    main()
