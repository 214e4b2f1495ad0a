"""Train four drafters for the tiny model: `python -m tools.speculative.train --out DIR --device cuda --minutes 6`.

The target continues its own training data (greedily, and at a temperature). The drafters learn its distribution from
these texts, one after the other, each for a share of the time. The program writes
DIR/{eagle3,dflash,draft_model}/{config.json,model.safetensors}, DIR/mtp/model.safetensors and DIR/report.json;
tools.speculative.install copies them to the tiny model.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.speculative.acceptance import ReplyBatch, greedy_replies, measure
from tools.speculative.dflash import DFlash
from tools.speculative.draft_model import DraftModel
from tools.speculative.drafter import Drafter
from tools.speculative.eagle3 import Eagle3
from tools.speculative.llama import Llama
from tools.speculative.mtp import Mtp
from tools.speculative.prompts import Document, Prompt, continued, documents, held_out, plain
from tools.speculative.texts import Texts
from tools.tiny.muon import Muon
from tools.tiny.train import rate_at

log = logging.getLogger("speculative.train")
ASSETS = Path("core/dovetail/assets/tiny")
SHARES = {"eagle3": 0.40, "dflash": 0.27, "mtp": 0.17, "draft_model": 0.16}
"""Share of each drafter of the time for training."""
GREEDY = 0.7
"""Share of the texts that the target continues greedily; the others are sampled at TEMPERATURE."""
TEMPERATURE = 0.8
AT_ONCE = 8192
"""Number of texts that the target continues in one batch."""
REPORT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold the settings of the command line."""

    out: Path
    model: Path
    device: str
    minutes: float
    seconds: float | None
    steps: int | None
    documents: int
    new_tokens: int
    reply_tokens: int
    workers: int
    cases: int
    batch_tokens: int
    batch_anchors: int
    rate: float
    draft_vocab: int
    eagle3_layers: tuple[int, int, int]
    seed: int
    only: tuple[str, ...]


class Clock:
    """Measure progress from 0 to 1, by steps if their number is given, else by time."""

    def __init__(self, seconds: float, steps: int | None) -> None:
        self.began, self.seconds, self.steps, self.done = time.monotonic(), seconds, steps, 0

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.began

    def progress(self) -> float:
        """Return the progress; it is 1 or more at the end."""
        return self.done / self.steps if self.steps else self.elapsed() / self.seconds


class Optimizer:
    """Update matrices of layers with Muon, and norms and parameters of the vocabulary with AdamW."""

    def __init__(self, drafter: Drafter, rate: float) -> None:
        named = list(drafter.named_parameters())
        inner = [(name, p) for name, p in named if p.ndim == 2 and "lm_head" not in name and "embed" not in name]
        matrices = {name for name, _ in inner}
        self.muon, self.rate = Muon([p for _, p in inner]), rate
        others = [p for name, p in named if name not in matrices]
        self.adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, share: float) -> None:
        """Update the parameters with a ``share`` of the peak learning rate."""
        for group in self.adam.param_groups:
            group["lr"] = self.rate * share
        self.muon.step(self.rate * share)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def fit(drafter: Drafter, target: Llama, texts: Texts, clock: Clock, rate: float) -> dict[str, Any]:
    """Train until the progress is 1. Return the number of steps and the last loss."""
    optimizer, cuda = Optimizer(drafter, rate), texts.device.type == "cuda"
    losses: list[torch.Tensor] = []
    reported, last = clock.elapsed(), float("nan")
    while (progress := clock.progress()) < 1:
        with torch.autocast(texts.device.type, torch.bfloat16, enabled=cuda):
            loss = drafter.loss(target, texts.sample())
        loss.backward()
        optimizer.step(rate_at(progress))
        losses.append(loss.detach())
        clock.done += 1
        if clock.elapsed() - reported > REPORT_SECONDS or clock.progress() >= 1:
            last, losses, reported = torch.stack(losses).mean().item(), [], clock.elapsed()
            log.info("%-11s step %6d  %5.1f s  loss %.4f", drafter.name, clock.done, reported, last)
    return {"steps": clock.done, "seconds": round(clock.elapsed(), 1), "loss": last}


def on_policy(target: Llama, drawn: Sequence[Document], new: int, seed: int) -> list[np.ndarray]:
    """Return the documents with the text after their cut replaced by the target's. Documents without a cut are returned
    unchanged."""
    device = target.device
    order = sorted((d for d in drawn if d.cut), key=lambda d: d.cut)
    out = [d.tokens for d in drawn if not d.cut or len(d.tokens) > 512]
    random = torch.Generator(device).manual_seed(seed)
    began, said = time.monotonic(), 0
    for start in range(0, len(order), AT_ONCE):
        part = order[start : start + AT_ONCE]
        greedy = int(len(part) * GREEDY)
        pick = np.random.default_rng((seed, start)).permutation(len(part))
        for rows, temperature in ((pick[:greedy], 0.0), (pick[greedy:], TEMPERATURE)):
            prompts = [part[row].tokens[: part[row].cut] for row in rows]
            if prompts:
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    texts = target.continue_texts([plain(prompt) for prompt in prompts], new, temperature, random)
                out += [continued(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
                said += sum(len(text) - len(prompt) for prompt, text in zip(prompts, texts, strict=True))
        seconds = time.monotonic() - began
        log.info(
            "generated    %6d of %d texts, %.2f M tokens, %.1f s", start + len(part), len(order), said / 1e6, seconds
        )
    return out


def build(name: str, target: Llama, texts: Texts, settings: Settings) -> Drafter:
    """Return a drafter of at most a million parameters, with initial weights."""
    torch.manual_seed(settings.seed)
    wide = target.shape
    if name == "draft_model":
        small = replace(wide, hidden_size=128, intermediate_size=352, num_attention_heads=2, num_key_value_heads=1)
        return DraftModel(small, 2, target.vocab_size)
    if name == "mtp":
        return Mtp(replace(wide, intermediate_size=512), target)
    if name == "dflash":
        return DFlash(replace(wide, intermediate_size=248), 2, (1, 2, 3), target)
    counts = texts.counts()
    tokens = np.sort(np.argsort(-counts, kind="stable")[: settings.draft_vocab])
    log.info(
        "eagle3: %d tokens are %.1f %% of the target's text", len(tokens), 100 * counts[tokens].sum() / counts.sum()
    )
    spare = 1_000_000 - 2000 - 256 * (3 * 256 + 2 * 512 + 256 + settings.draft_vocab)
    shape = replace(wide, intermediate_size=spare // 768 // 8 * 8)
    return Eagle3(shape, torch.from_numpy(tokens), settings.eagle3_layers, target)


def train_one(
    name: str, target: Llama, texts: Texts, replies: Sequence[ReplyBatch], settings: Settings, seconds: float
) -> dict[str, Any]:
    """Train, write, read back and measure one drafter."""
    drafter = build(name, target, texts, settings).to(texts.device)
    size = sum(p.numel() for p in drafter.parameters())
    assert size <= 1_000_000, f"{name} has {size} parameters"
    log.info("%-11s %d parameters, %.0f s", name, size, seconds)
    report = fit(drafter, target, texts, Clock(seconds, settings.steps), settings.rate)
    drafter.save(settings.out / name, target)
    drafter.load(settings.out / name)
    began = time.monotonic()
    result = measure(drafter, target, replies)
    log.info(
        "%-11s ACCEPTANCE LENGTH %.3f (mean of suites %.3f) with %d drafts, measured in %.1f s",
        name, result.tokens_per_step, result.mean_of_suites, drafter.drafts, time.monotonic() - began,
    )  # fmt: skip
    return {**report, "parameters": size, "drafts": drafter.drafts, **asdict(result)}


def prepare(settings: Settings) -> tuple[list[Document], list[Prompt]]:
    """Draw training documents, and held-out prompts that are not among them, on the host."""
    began, tokenizer = time.monotonic(), settings.model / "tokenizer.json"
    held = held_out(tokenizer, settings.cases, seed=7)
    log.info("%d held-out prompts, %.1f s", len(held.prompts), time.monotonic() - began)
    drawn = documents(tokenizer, settings.documents, settings.workers, settings.seed, held.turns)
    log.info("%d documents, %.1f s", len(drawn), time.monotonic() - began)
    return drawn, held.prompts


def run(settings: Settings) -> dict[str, Any]:
    """Train and measure all drafters; return the report."""
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    drawn, prompts = prepare(settings)
    target = Llama.load(settings.model, torch.device(settings.device))
    replies = greedy_replies(target, prompts, settings.reply_tokens)
    log.info("held-out replies, %.1f s", time.monotonic() - began)
    texts = Texts(
        target, on_policy(target, drawn, settings.new_tokens, settings.seed), settings.batch_tokens,
        settings.batch_anchors, settings.seed,
    )  # fmt: skip
    names = settings.only or tuple(SHARES)
    rest = settings.minutes * 60 - (time.monotonic() - began) - 6 * len(names)
    left = settings.seconds * len(names) if settings.seconds is not None else max(rest, 5.0)
    whole = sum(SHARES[name] for name in names)
    report: dict[str, Any] = {"torch": torch.__version__, "device": settings.device, "documents": len(drawn)}
    for name in names:
        try:
            report[name] = train_one(name, target, texts, replies, settings, left * SHARES[name] / whole)
        except RuntimeError as error:  # out of memory, for example: train the other drafters anyway
            log.exception("%s failed", name)
            report[name] = {"failed": str(error)}
        (settings.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    log.info("done, %.1f s", time.monotonic() - began)
    return report


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; the defaults depend on the device."""
    parser = argparse.ArgumentParser(description="Train drafters for the tiny model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=ASSETS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=6.0, help="for the whole run, including data and measuring")
    parser.add_argument(
        "--seconds",
        type=float,
        help="of training each drafter on average, instead of --minutes; the shares stay the same",
    )
    parser.add_argument(
        "--steps", type=int, help="of training each drafter, instead of a time: every run has the same result"
    )
    parser.add_argument("--documents", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--reply-tokens", type=int, help="maximum length of a held-out reply for measuring acceptance")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cases", type=int, help="held-out prompts of each suite")
    parser.add_argument("--batch-tokens", type=int)
    parser.add_argument("--batch-anchors", type=int)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument(
        "--draft-vocab",
        type=int,
        default=1408,
        help="draft vocabulary of eagle3; its MLP uses the remaining parameters",
    )
    parser.add_argument(
        "--eagle3-layers", type=int, nargs=3, default=(0, 1, 2), help="layers whose outputs eagle3 reads"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=tuple(SHARES), default=())
    args = parser.parse_args(arguments)
    cuda = args.device.startswith("cuda")
    defaults = {
        "documents": 160_000 if cuda else 200,
        "new_tokens": 192 if cuda else 48,
        "reply_tokens": 160 if cuda else 48,
        "workers": max((os.cpu_count() or 2) - 1, 1) if cuda else 0,
        "cases": 16 if cuda else 2,
        "batch_tokens": 32768 if cuda else 2048,
        "batch_anchors": 4096 if cuda else 256,
    }
    given = {name: value for name, value in vars(args).items() if value is not None or name not in defaults}
    return Settings(**{**defaults, **given, "only": tuple(args.only), "eagle3_layers": tuple(args.eagle3_layers)})


def main() -> None:
    """Train, measure and write."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = parse()
    settings.out.mkdir(parents=True, exist_ok=True)
    report = run(settings)
    failed = [name for name in SHARES if "failed" in report.get(name, {})]
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed, see above")


if __name__ == "__main__":
    main()
