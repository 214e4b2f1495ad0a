"""Copy a checkpoint tensor by tensor, with some weights quantized."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from dovetail.config.checkpoint import read_json
from dovetail.engine.shards import DTYPES, StoredTensor, stored_tensors
from dovetail.engine.weights import INDEX, SINGLE, checkpoint_files
from dovetail.errors import ConfigError
from dovetail.gguf.directory import gguf_files, is_gguf_directory
from dovetail.quantize.modules import modules_of
from dovetail.quantize.schemes import Rounding, WritingScheme

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Sizes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
RoundingOf = Callable[[str], Rounding | None]
"""A function that returns how the weight of a module is rounded; None: to the nearest."""


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Hold what a module has lost: the root mean square of the error relative to that of the weight, and the largest error
    relative to the largest weight."""

    name: str
    relative: float
    largest: float


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """Describe a copy of the checkpoint ``source`` to the new directory ``target``. ``ignore`` are regular expressions of
    whole names of modules that are left out."""

    source: Path
    target: Path
    scheme: WritingScheme
    ignore: Sequence[str] = ()


def write_quantized(
    job: QuantizeJob, rounding: RoundingOf = lambda name: None, done: Callable[[ModuleError], None] = lambda one: None
) -> list[ModuleError]:
    """Write the quantized checkpoint, one tensor in memory at a time, and return what each module has lost, which ``done``
    also receives. The directory ``target`` appears when all of it is written. Raises ``ConfigError`` and ``WeightsError``."""
    chosen = {f"{name}.weight" for name in check_job(job)}
    files = {file: stored_tensors(file) for file in checkpoint_files(job.source)}
    config = read_json(job.source, "config.json")
    ignored = [
        tensor.name.removesuffix(".weight")
        for tensors in files.values()
        for tensor in tensors
        if tensor.name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.name not in chosen
        and "embed" not in tensor.name
    ]
    ignored += [] if "lm_head" in ignored else ["lm_head"]
    errors, places = list[ModuleError](), dict[str, str]()
    with _appearing(job.target) as folder:
        for file, tensors in files.items():
            errors += _write_file(job, file, folder / file.name, tensors, chosen, rounding, done)
            places |= {name: file.name for tensor in tensors for name in _sizes(job, tensor, chosen)}
        if files.keys() != {job.source / SINGLE}:
            total = sum((folder / file.name).stat().st_size for file in files)
            index = {"metadata": {"total_size": total}, "weight_map": places}
            (folder / INDEX).write_text(json.dumps(index, indent=2))
        _copy_others(job.source, folder)
        config["quantization_config"] = job.scheme.config(ignored)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    return errors


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Provide a folder beside ``target`` that becomes ``target`` at the end, or is deleted after an exception. Raises
    ``ConfigError`` if it cannot be written."""
    folder: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield folder
        folder.chmod(0o755)
        folder.rename(target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}; name a new directory that can be") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def check_job(job: QuantizeJob) -> list[str]:
    """Return the modules whose weights are quantized, in the order of the model. Raises ``ConfigError`` if the job is not
    possible."""
    if job.target.exists() and (not job.target.is_dir() or any(job.target.iterdir())):
        raise ConfigError(f"{job.target} exists and is not an empty directory; name a new one")
    if is_gguf_directory(job.source):
        raise ConfigError(f"{gguf_files(job.source)[0]} is a GGUF file; give a checkpoint in safetensors")
    for pattern in job.ignore:
        _check_pattern(pattern)
    tensors = [tensor for file in checkpoint_files(job.source) for tensor in stored_tensors(file)]
    known = modules_of(job.source)
    for pattern in job.ignore:
        if not any(re.fullmatch(pattern, name) for name in known):
            raise ConfigError(
                f"--ignore {pattern!r} matches no module; allowed: regular expressions of whole names, such as {known[0]!r}"
            )
    wanted = {name for name in known if not any(re.fullmatch(pattern, name) for pattern in job.ignore)}
    chosen: set[str] = set()
    for tensor in tensors:
        if tensor.name in wanted and len(tensor.shape) > 2:
            raise ConfigError(
                f"{tensor.name} holds several experts; implemented: tensors of one expert each. Leave it out (--ignore)"
            )
        if tensor.name.removesuffix(".weight") in wanted and len(tensor.shape) == 2:
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ConfigError(f"{tensor.name} is {tensor.dtype}; implemented: float32, bfloat16, float16")
            job.scheme.check(tensor.name.removesuffix(".weight"), tensor.shape)
            chosen.add(tensor.name.removesuffix(".weight"))
    if not chosen:
        raise ConfigError(f"{job.source} has no weight that is left to quantize")
    return [name for name in known if name in chosen]


def _check_pattern(pattern: str) -> None:
    """Raise ``ConfigError`` if ``pattern`` is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--ignore {pattern!r} is not a regular expression: {error}") from error


def _sizes(job: QuantizeJob, tensor: StoredTensor, chosen: set[str]) -> Sizes:
    """Return what is written of a tensor."""
    if not isinstance(tensor.dtype, torch.dtype):
        raise ConfigError(f"{tensor.name} has the dtype {tensor.dtype}, which is not implemented")
    if tensor.name in chosen:
        return job.scheme.stored(tensor.name.removesuffix(".weight"), tensor.shape, tensor.dtype)
    return {tensor.name: (tensor.dtype, tensor.shape)}


def _write_file(
    job: QuantizeJob,
    file: Path,
    target: Path,
    tensors: Sequence[StoredTensor],
    chosen: set[str],
    rounding: RoundingOf,
    done: Callable[[ModuleError], None],
) -> list[ModuleError]:
    sizes = {name: size for tensor in tensors for name, size in _sizes(job, tensor, chosen).items()}
    errors = list[ModuleError]()
    with safe_open(file, framework="pt") as opened, target.open("wb") as out:
        offsets = _write_header(out, sizes)
        for tensor in tensors:
            value: torch.Tensor = opened.get_tensor(tensor.name)
            made = {tensor.name: value}
            if tensor.name in chosen:
                module = tensor.name.removesuffix(".weight")
                made, exact = job.scheme.quantized(module, value, rounding(module))
                errors.append(_error(module, value.float(), exact))
                done(errors[-1])
            for name, part in made.items():
                assert (part.dtype, tuple(part.shape)) == sizes[name], name
                out.seek(offsets[name])
                out.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
    return errors


def _write_header(out: BufferedWriter, sizes: Sizes) -> dict[str, int]:
    """Write the header of a safetensors file with tensors of ``sizes``, and return where each begins."""
    entries, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, (dtype, shape) in sizes.items():
        count = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (end, end + count)}
        end += count
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    out.write(len(header).to_bytes(8, "little") + header)
    start = 8 + len(header)
    out.truncate(start + end)
    return {name: start + entry["data_offsets"][0] for name, entry in entries.items() if name != "__metadata__"}


def _error(name: str, weight: torch.Tensor, exact: torch.Tensor) -> ModuleError:
    lost, whole = exact - weight, max(float(weight.square().mean().sqrt()), 1e-30)
    return ModuleError(
        name,
        float(lost.square().mean().sqrt()) / whole,
        float(lost.abs().max()) / max(float(weight.abs().max()), 1e-30),
    )


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the other files: those of the tokenizer, and texts."""
    for file in sorted(source.iterdir()):
        kept = file.suffix in (".json", ".txt", ".model", ".jinja", ".md") or file.name.startswith(
            ("LICENSE", "USE_POLICY")
        )
        if file.is_file() and kept and file.name not in ("config.json", INDEX):
            shutil.copyfile(file, folder / file.name)


def report(job: QuantizeJob, errors: Sequence[ModuleError]) -> Mapping[str, Any]:
    """Return the report of a copy, for JSON."""
    size = {
        what: sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        for what, directory in (("source_bytes", job.source), ("target_bytes", job.target))
    }
    mean = sum(one.relative for one in errors) / len(errors)
    modules = [{"name": one.name, "relative_error": one.relative, "largest_error": one.largest} for one in errors]
    scheme = {"kind": job.scheme.kind, "group_size": job.scheme.group, "symmetric": job.scheme.symmetric}
    return {"scheme": scheme, **size, "mean_relative_error": mean, "modules": modules}


def worst(errors: Sequence[ModuleError], count: int) -> Iterator[ModuleError]:
    """Yield the modules that have lost most."""
    yield from sorted(errors, key=lambda one: -one.relative)[:count]
