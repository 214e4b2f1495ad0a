"""Make virtual environments for the tests of what a user installs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

DOVETAIL = ["-c", "from dovetail.cli import main; main()"]
_PIP = ["--disable-pip-version-check", "install", "--quiet"]
_OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]


class Environment:
    """Make a virtual environment that starts with the packages of this one, so that nothing is downloaded. It does not
    show that the dependencies which a package names are sufficient."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        own = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
        here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        Path(own, "what_is_here.pth").write_text(here)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "XDG_DATA_HOME": str(self.folder / "data"), "COLUMNS": "200"}

    def run(self, *arguments: str, status: tuple[int, ...] = (0,)) -> str:
        """Run Python in it. Returns what it prints."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode in status, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *sources: str) -> None:
        """Run pip, as far as it works without a network."""
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.python), *_PIP, *_OFFLINE, *sources],
            cwd=self.folder,
            env=self.env,
            check=True,
            timeout=280,
        )
