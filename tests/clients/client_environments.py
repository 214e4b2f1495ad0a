"""Install clients of other projects, each group in a virtual environment of its own, which later runs reuse.

They are kept in the folder CLIENT_ENVIRONMENTS, by default ~/.cache/dovetail-clients. A client that the package index does
not have, or an index that cannot be reached, skips its tests and says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("CLIENT_ENVIRONMENTS") or Path.home() / ".cache" / "dovetail-clients")
HERE = Path(__file__).parent
_PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries", "1"]
_INSTALL_SECONDS = 900


@dataclass(frozen=True)
class Client:
    """Describe one environment: packages that are installed with what they need, packages that are installed alone
    because what they need is a build of torch for CUDA, and whether the packages of this environment are found after
    its own (torch, for example)."""

    name: str
    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()
    shared: bool = False

    def python(self) -> Path:
        """Return its interpreter. Installs it the first time, and skips the test if that is impossible."""
        known = json.dumps([sys.version_info[:2], self.packages, self.alone, self.shared, sys.prefix])
        folder = FOLDER / f"{self.name}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "installed").exists():
                self._install(folder)
        return folder / "venv" / "bin" / "python"

    def _install(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=True, clear=True)
        python = folder / "venv" / "bin" / "python"
        if self.shared:
            own = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
            also = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            Path(own, "zz_what_is_here.pth").write_text(also)
        for more, packages in (((), self.packages), (("--no-deps",), self.alone)):
            if packages:
                self._pip(python, *more, *packages)
        (folder / "installed").touch()

    def _pip(self, python: Path, *arguments: str) -> None:
        try:
            done = subprocess.run(
                [python, *_PIP, *arguments], capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(
                f"the clients of {self.name} took over {_INSTALL_SECONDS} s to install; their folder is {FOLDER}"
            )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            pytest.skip(f"the clients of {self.name} cannot be installed from the package index: {errors[-1][:300]}")

    def package(self, name: str) -> Path:
        """Return the folder of one of its packages."""
        own = sysconfig.get_path("purelib", vars={"base": str(self.python().parents[1])})
        return Path(own, name)

    def run(self, *arguments: str | Path, folder: Path, seconds: float = 600, **env: str) -> str:
        """Run Python in it, in ``folder``. Returns its standard output."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        done = subprocess.run(
            [self.python(), *arguments],
            cwd=folder,
            env={**inherited, "OPENAI_API_KEY": "none", "NO_COLOR": "1", **env},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return done.stdout

    def results(self, script: str, *arguments: str, folder: Path, **env: str) -> Any:
        """Run a script of this folder. Returns the JSON of its last line."""
        return json.loads(self.run(HERE / script, *arguments, folder=folder, **env).splitlines()[-1])


SDKS = Client("sdks", ("openai>=2", "litellm!=1.107.0", "langchain-openai", "openai-agents", "outlines"))
LM_EVAL = Client("lm-eval", ("lm-eval[api]", "transformers"))
AIPERF = Client("aiperf", ("aiperf",))
SGLANG = Client(
    "sglang",
    (
        *("aiohttp", "datasets", "ipython", "msgspec", "numpy", "orjson", "pillow", "psutil", "pybase64", "pydantic"),
        *("pyzmq", "requests", "tqdm", "transformers"),
    ),
    alone=("sglang",),
)
GUIDELLM = Client(
    "guidellm",
    (
        *(
            "click~=8.4.0",
            "culsans~=0.10.0",
            "datasets",
            "eval_type_backport",
            "faker",
            "ftfy",
            "httpx[http2]",
            "loguru",
        ),
        *("more-itertools", "msgpack", "protobuf", "pydantic-settings", "pyyaml", "rich", "sanic", "tabulate"),
        *("transformers", "uvloop", "websockets"),
    ),
    alone=("guidellm",),
    shared=True,
)
VLLM = Client(
    "vllm",
    (
        *(
            "aiohttp",
            "cachetools",
            "cbor2",
            "cloudpickle",
            "datasets",
            "diskcache",
            "einops",
            "msgspec",
            "openai_harmony",
        ),
        *("pandas", "partial_json_parser", "pillow", "prometheus_client", "psutil", "py-cpuinfo", "pybase64", "pyzmq"),
        *("requests", "setproctitle", "tqdm"),
    ),
    alone=("vllm",),
    shared=True,
)
