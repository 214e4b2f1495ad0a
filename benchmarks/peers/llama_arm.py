"""Run llama.cpp through its C interface: all prompts of a call are sequences of one context, which leave when they have their
tokens. ``options`` names the directory of its sources (``source``, with ``include``), of its build (``build``), and the limits of the context."""

from __future__ import annotations

import ctypes
import subprocess
from itertools import accumulate
from pathlib import Path

from peers.worker import Setup, serve

SHIM = Path(__file__).with_name("llama_shim.cpp")
Numbers = ctypes.c_int32


class LlamaCpp:
    """Run libllama with its defaults, and with batches of 2,048 tokens."""

    def __init__(self, setup: Setup) -> None:
        source, build = Path(setup.options["source"]), Path(setup.options["build"])
        self._library = ctypes.CDLL(str(compiled(source, build)))
        self._library.shim_open.restype = ctypes.c_void_p
        sizes = setup.threads, setup.options["sequences"], setup.options["context"]
        self._engine = ctypes.c_void_p(self._library.shim_open(setup.model.encode(), *sizes))
        if not self._engine:
            raise RuntimeError(f"llama.cpp did not load {setup.model}")
        self._version = version_of(build)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        flat = [token for prompt in prompts for token in prompt]
        count, total = len(prompts), sum(output_lens)
        lens, outs = (Numbers * count)(*map(len, prompts)), (Numbers * count)(*output_lens)
        out = (Numbers * total)()
        error = self._library.shim_generate(self._engine, (Numbers * len(flat))(*flat), lens, outs, count, out)
        if error:
            raise RuntimeError(f"llama_decode returned {error}")
        ends = list(accumulate(output_lens))
        return [list(out[end - n : end]) for end, n in zip(ends, output_lens, strict=True)]

    def reset(self) -> None:
        """Do nothing, because a call leaves no state."""

    def profile(self, prompts: list[list[int]], output_lens: list[int]) -> str:
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        return {"llama.cpp": self._version}


def version_of(build: Path) -> str:
    """Return the version and the commit that ggml, which llama.cpp contains, was built from. libllama itself states none."""
    library = ctypes.CDLL(str(build / "bin" / "libggml-base.so"))
    library.ggml_version.restype = library.ggml_commit.restype = ctypes.c_char_p
    return f"ggml {library.ggml_version().decode()} ({library.ggml_commit().decode()})"


def compiled(source: Path, build: Path) -> Path:
    """Return the shim as a library in ``build``, compiled if it is older than its source."""
    target = build / "dovetail_shim.so"
    if not target.exists() or target.stat().st_mtime < SHIM.stat().st_mtime:
        include = [f"-I{source / 'include'}", f"-I{source / 'ggml' / 'include'}"]
        libraries = [f"-L{build / 'bin'}", f"-Wl,-rpath,{build / 'bin'}", "-lllama", "-lggml", "-lggml-base"]
        command = ["g++", "-O2", "-std=c++17", "-fPIC", "-shared", *include, str(SHIM), "-o", str(target), *libraries]
        subprocess.run(command, check=True)
    return target


if __name__ == "__main__":
    serve(LlamaCpp)
