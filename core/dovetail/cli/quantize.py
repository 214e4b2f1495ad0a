"""Write a quantized copy of a checkpoint: ``dovetail quantize``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dovetail.quantize.schemes import WritingScheme
    from dovetail.quantize.writer import QuantizeJob, RoundingOf

WORST = 8
"""The number of modules that the terminal shows."""


class Kind(StrEnum):
    """Enumerate the schemes."""

    FP8 = "fp8"
    INT8 = "int8"
    W8A16 = "w8a16"
    INT4 = "int4"


def quantize(
    model: Annotated[str, typer.Argument(help="Directory (or name) of an unquantized checkpoint in safetensors.")],
    output: Annotated[Path, typer.Argument(help="New directory for the quantized checkpoint.")],
    scheme: Annotated[
        Kind,
        typer.Option(help="fp8 and int8: W8A8, a scale for each row. w8a16 and int4: activations of 16 bits."),
    ] = Kind.INT4,
    group_size: Annotated[
        int, typer.Option(help="Columns that have one scale, of w8a16 and int4; -1: a scale for each row.")
    ] = 128,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Store zero points, of w8a16 and int4.")] = False,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Regular expression of whole names of modules to leave out; repeatable.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text file, a text on each line: round by GPTQ so that outputs for these texts change least."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the report of all modules to this JSON file.")
    ] = None,
) -> None:
    """Write a quantized copy of a checkpoint, which transformers, vLLM and SGLang read too (compressed-tensors).

    Weights are rounded to the nearest number, one tensor in memory at a time, or, with a calibration file, by GPTQ,
    which needs transformers and memory for the whole model. The head and routers are not quantized.
    """
    from dovetail.config.checkpoint import locate
    from dovetail.errors import ConfigError
    from dovetail.quantize.writer import QuantizeJob, worst, write_quantized
    from dovetail.quantize.writer import report as report_of

    if report is not None and not report.parent.is_dir():
        raise ConfigError(f"--report is {report}, and {report.parent} is no directory; create it, or name another file")
    job = QuantizeJob(locate(model), output, _scheme(scheme, group_size, asymmetric), tuple(ignore or ()))
    errors = write_quantized(job, _rounding(job, calibration))
    made = report_of(job, errors)
    if report is not None:
        report.write_text(json.dumps(made, indent=2) + "\n")
    sizes = [f"{made[what] / 1e9:.2f} GB" for what in ("source_bytes", "target_bytes")]
    typer.echo(f"{output}: {len(errors)} modules in {scheme}, {' -> '.join(sizes)}")
    typer.echo(f"relative error of weights: {made['mean_relative_error']:.4f} on average; the largest:")
    for one in worst(errors, WORST):
        typer.echo(f"  {one.relative:.4f}  {one.name}")


def _scheme(kind: Kind, group_size: int, asymmetric: bool) -> WritingScheme:
    from dovetail.errors import ConfigError
    from dovetail.quantize.schemes import WritingScheme

    if kind in (Kind.FP8, Kind.INT8) and asymmetric:
        raise ConfigError(f"--asymmetric is given with --scheme {kind}; allowed: with w8a16 and int4")
    if group_size != -1 and (group_size < 32 or group_size % 32):
        raise ConfigError(f"--group-size is {group_size}; allowed: multiples of 32, and -1 for a scale for each row")
    group = None if group_size == -1 or kind in (Kind.FP8, Kind.INT8) else group_size
    return WritingScheme(kind.value, group, not asymmetric)


def _rounding(job: QuantizeJob, calibration: Path | None) -> RoundingOf:
    if calibration is None:
        return lambda name: None
    from dovetail.quantize.calibration import calibrated

    return calibrated(job, calibration)
