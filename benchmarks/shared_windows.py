"""Count what it saves to read the keys that rows share once in layers with a window, on an H200. Needs no GPU.

    python benchmarks/shared_windows.py

Rows of a group share a prefix of ``PREFIX`` tokens and have had between ``OWN`` and ``OWN + OUTPUT`` tokens of their own. A layer
with a window of w tokens reads w keys for each row. Of these, all rows of a group see the same w - own ones, as long as
each has fewer than w tokens of its own. A layer without a window reads the whole prefix. Sharing costs a second launch and a
merge for each layer, which takes about as long as reading ``SHARING_BYTES`` (``dovetail_attention.triton.backend``).
"""

from __future__ import annotations

from dataclasses import dataclass

PREFIX, OWN, OUTPUT = 8192, 100, 256
BYTES_PER_SECOND = 4.2e12
SHARING_BYTES = 128 << 20
ROWS = ((16, 1), (64, 4), (256, 16))


@dataclass(frozen=True)
class Model:
    """Describe the layers of a model: keys and values of 16 bits, and the bytes of weights that a step reads."""

    name: str
    window: int
    sliding: int
    full: int
    kv_heads: int
    head_dim: int
    weights: float

    @property
    def token_bytes(self) -> int:
        """Return the bytes of keys and values of a token in a layer."""
        return 4 * self.kv_heads * self.head_dim


MODELS = (
    Model("gpt-oss-20b", 128, 12, 12, 8, 64, 13e9),
    Model("Gemma-3-4B", 1024, 29, 5, 4, 256, 8e9),
    Model("Gemma-3-27B", 1024, 52, 10, 16, 128, 54e9),
    Model("Phi-3-mini", 2047, 32, 0, 32, 96, 7.6e9),
    Model("Gemma-2-27B", 4096, 23, 23, 16, 128, 54e9),
    Model("Mistral-7B-v0.1", 4096, 32, 0, 8, 128, 14.5e9),
)


def saved(model: Model, rows: int, groups: int, seen: int) -> float:
    """Return the seconds that sharing saves in a layer of which all rows of a group see ``seen`` shared keys. It is
    negative where sharing costs more than it saves."""
    return ((rows - groups) * seen * model.token_bytes - SHARING_BYTES) / BYTES_PER_SECOND


def mean_saved(model: Model, rows: int, groups: int) -> float:
    """Return the mean over the output of the seconds saved in a layer with a window, which shares only where this pays."""
    steps = range(OWN, OWN + OUTPUT)
    return sum(max(0.0, saved(model, rows, groups, max(0, model.window - own))) for own in steps) / OUTPUT


def step(model: Model, rows: int) -> float:
    """Return the seconds in which a step without sharing reads weights, keys and values."""
    own = OWN + OUTPUT // 2
    keys = model.sliding * min(model.window, PREFIX + own) + model.full * (PREFIX + own)
    return (model.weights + rows * keys * model.token_bytes) / BYTES_PER_SECOND


def main() -> None:
    """Print a row for each model and number of rows."""
    print(f"prefix {PREFIX}, own tokens {OWN} to {OWN + OUTPUT}, groups of {ROWS[0][0]}")
    print(
        f"{'':18}{'window':>8}{'rows':>6}{'us a sliding layer':>20}{'us a full layer':>17}{'ms a step':>11}{'saved':>18}"
    )
    for model in MODELS:
        for rows, groups in ROWS:
            windows = mean_saved(model, rows, groups)
            full = max(0.0, saved(model, rows, groups, PREFIX)) if model.full else 0.0
            whole = step(model, rows)
            shares = f"{model.sliding * windows / whole:8.1%} +{model.full * full / whole:6.1%}"
            print(
                f"{model.name:18}{model.window:8}{rows:6}{windows * 1e6:20.1f}{full * 1e6:17.1f}{whole * 1e3:11.2f}{shares:>18}"
            )


if __name__ == "__main__":
    main()
