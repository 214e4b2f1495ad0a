"""Generate training data: `python -m tools.tiny.make_data --out DATA --tokens 2e8 --workers 8`.

Workers write shards `shard-WORKER-INDEX.npy` of uint16: the low 12 bits are the token id, bit 15 marks tokens that the
model must produce itself, bit 14 marks the first token of a document. A shard appears under its name only when it is
whole, so a trainer may read the folder while it fills.
"""

import argparse
import os
from collections.abc import Iterator
from multiprocessing import Process
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer
from tools.tiny.corpus.conversation import document

LEARN, FIRST, ID_MASK = 0x8000, 0x4000, 0x0FFF
SHARD_TOKENS = (1 << 20) + 1
CONTEXT = 2048
BATCH = 512
"""Number of documents encoded in one call."""
ASSETS = Path("core/dovetail/assets/tiny")


def encoded(tokenizer: Tokenizer, rng: Random) -> Iterator[np.ndarray]:
    """Yield documents without end, as flagged token arrays. Documents longer than the context are dropped."""
    while True:
        documents = [document(rng) for _ in range(BATCH)]
        texts = [segment.text for segments in documents for segment in segments]
        ids = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for segments in documents:
            parts = [np.array(next(ids).ids, np.uint16) | (LEARN if segment.learn else 0) for segment in segments]
            tokens = np.concatenate(parts)
            tokens[0] |= FIRST
            if len(tokens) <= CONTEXT:
                yield tokens


def shards(tokenizer: Tokenizer, rng: Random) -> Iterator[np.ndarray]:
    """Yield arrays of SHARD_TOKENS tokens without end; a document may continue in the next shard."""
    held: list[np.ndarray] = []
    size = 0
    for tokens in encoded(tokenizer, rng):
        held.append(tokens)
        size += len(tokens)
        if size >= SHARD_TOKENS:
            joined = np.concatenate(held)
            yield joined[:SHARD_TOKENS]
            held, size = [joined[SHARD_TOKENS:]], size - SHARD_TOKENS


def work(worker: int, count: int, seed: int, tokenizer_file: Path, out: Path) -> None:
    """Write `count` shards."""
    os.nice(5)
    stream = shards(Tokenizer.from_file(str(tokenizer_file)), Random(f"{seed}-{worker}"))
    for index, shard in zip(range(count), stream, strict=False):
        part = out / f"part-{worker:03d}-{index:04d}.npy"
        np.save(part, shard)
        part.rename(out / f"shard-{worker:03d}-{index:04d}.npy")


def generate(out: Path, tokens: int, workers: int, seed: int, tokenizer_file: Path) -> None:
    """Run the workers and wait until they have finished."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out.mkdir(parents=True, exist_ok=True)
    each = -(-tokens // (workers * SHARD_TOKENS))
    running = [Process(target=work, args=(worker, each, seed, tokenizer_file, out)) for worker in range(workers)]
    for process in running:
        process.start()
    for process in running:
        process.join()


def main() -> None:
    """Read the command line and generate."""
    parser = argparse.ArgumentParser(description="Generate the training data of the tiny model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=2e8)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, default=ASSETS / "tokenizer.json")
    args = parser.parse_args()
    generate(args.out, int(args.tokens), args.workers, args.seed, args.tokenizer)


if __name__ == "__main__":
    main()
