"""A package that brings a kind of its own, with no change to the core: configured, negotiated, explained, listed, begun and
checked as the built-in kinds are, and applied to prompts.

Run: python -m pytest -q tests/e2e/test_example_kind.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fresh import run_python

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dovetail-prompt-rewriters"
DOVETAIL = ["-c", "from dovetail.cli import main; main()"]
BOTH = "prompt_rewriter=[normalize, redact]"


def install(source: Path, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *offline, str(source)], check=True, timeout=120)


class Site:
    """A folder that packages are installed in, and fresh processes that see them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, arguments: list[str], directory: Path, status: int = 0, **env: str) -> str:
        """Run Python; returns what it prints, or, where it is to fail, its errors."""
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
        done = run_python(arguments, directory, {**given, "XDG_DATA_HOME": str(directory), **env})
        assert done.returncode == status, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stderr if status else done.stdout

    def dovetail(self, *words: str, directory: Path, status: int = 0, **env: str) -> str:
        return self.run([*DOVETAIL, *words], directory, status, **env)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    target = tmp_path_factory.mktemp("kind")
    install(EXAMPLE, target)
    return Site(target)


def test_it_is_listed_and_shown(site: Site, tmp_path: Path) -> None:
    listed = json.loads(site.dovetail("plugins", "list", "--json", directory=tmp_path))["components"]
    mine = {c["name"]: c["offers"] for c in listed if c["kind"] == "prompt_rewriter"}
    assert mine == {
        "normalize": ["prompt_rewriter.idempotent", "prompt_rewriter.normalizes"],
        "redact": ["prompt_rewriter.idempotent"],
    }
    shown = site.dovetail("plugins", "show", "prompt_rewriter/redact", directory=tmp_path)
    assert "prompt_rewriter.normalizes" in shown
    assert "patterns: " in shown
    doctor = site.dovetail("plugins", "doctor", "--set", BOTH, "--json", directory=tmp_path)
    found = {f["what"].strip(): f["status"] for f in json.loads(doctor)["findings"]}
    assert found["prompt_rewriter/redact"] == "ready"
    missing = site.run([*DOVETAIL, "plugins", "doctor", "--set", "prompt_rewriter=nope", "--json"], tmp_path, status=1)
    assert missing == ""


def test_its_section_is_configured_as_the_others(site: Site, tmp_path: Path) -> None:
    shown = yaml.safe_load(site.dovetail("config", "show", directory=tmp_path))
    assert shown["prompt_rewriter"] == "none"
    (tmp_path / "config.yaml").write_text(
        *re.findall(r"^```yaml\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.M | re.S)
    )
    shown = yaml.safe_load(site.dovetail("config", "show", "config.yaml", directory=tmp_path))
    assert [part["kind"] for part in shown["prompt_rewriter"]] == ["normalize", "redact"]
    assert shown["prompt_rewriter"][1]["mask"] == "***"
    env = {"DOVETAIL_PROMPT_REWRITER": "normalize", "DOVETAIL_PROMPT_REWRITER__FORM": "NFKC"}
    shown = yaml.safe_load(site.dovetail("config", "show", directory=tmp_path, **env))
    assert shown["prompt_rewriter"] == {"kind": "normalize", "form": "NFKC"}
    schema = json.loads(site.dovetail("config", "schema", directory=tmp_path))["properties"]["prompt_rewriter"]
    assert {"enum": ["auto", "none"]} in schema["anyOf"]
    assert {"enum": ["normalize", "redact"]} in schema["anyOf"]
    docs = site.dovetail("config", "docs", directory=tmp_path)
    assert "| `prompt_rewriter` | component | `none` | Rewrites prompts" in docs
    assert "### `prompt_rewriter: redact`" in docs


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prompt_rewritr=redact", "did you mean 'prompt_rewriter'?"),
        ("prompt_rewriter=nope", "no prompt_rewriter component is called 'nope'; installed: normalize, redact"),
        ("prompt_rewriter={kind: normalize, form: NFX}", "prompt_rewriter.form is 'NFX'; allowed: 'NFC' or 'NFKC'"),
        (
            "prompt_rewriter={kind: normalize, from: NFC}",
            "prompt_rewriter.from is not a key of prompt_rewriter 'normalize'",
        ),
        ("prompt_rewriter=3", "allowed: one of auto, none, normalize, redact"),
        ("kinds={}", "kinds is not a key of the config"),
    ],
)
def test_what_is_wrong_in_its_section_is_refused(site: Site, tmp_path: Path, setting: str, said: str) -> None:
    assert said in site.dovetail("config", "show", "--set", setting, directory=tmp_path, status=2)


def test_the_config_hash_counts_it_where_it_is_used(site: Site, tmp_path: Path) -> None:
    hashes = [site.dovetail("config", "hash", "--set", s, directory=tmp_path) for s in ("model=tiny", BOTH)]
    alone = Site(tmp_path / "empty").dovetail("config", "hash", directory=tmp_path)
    assert hashes[0] == alone != hashes[1]


def test_it_is_negotiated_and_explained(site: Site, tmp_path: Path) -> None:
    explained = json.loads(site.dovetail("explain", "--json", "--set", BOTH, directory=tmp_path))
    *_, last = explained["resolutions"]
    assert (last["slot"], last["chosen"], last["rule"]) == ("prompt_rewriter", "normalize, redact", "explicit")
    assert [part["name"] for part in explained["lists"]["prompt_rewriter"]] == ["normalize", "redact"]
    assert [c["verdict"] for c in last["candidates"]] == ["chosen", "chosen"]
    off = json.loads(site.dovetail("explain", "--json", directory=tmp_path))
    assert off["resolutions"][-1]["note"] == "config names none"
    everything = json.loads(site.dovetail("explain", "--json", "--set", "prompt_rewriter=auto", directory=tmp_path))
    assert everything["resolutions"][-1]["chosen"] == "normalize, redact"
    assert "prompt_rewriter" in site.dovetail("explain", "--set", BOTH, directory=tmp_path)
    assert "redact" in site.dovetail("explain", "--set", BOTH, directory=tmp_path)


def test_what_does_not_fit_is_refused_with_the_way_out(site: Site, tmp_path: Path) -> None:
    alone = site.dovetail("explain", "--set", "prompt_rewriter=redact", directory=tmp_path, status=2)
    assert "prompt_rewriter 'redact' needs prompt_rewriter.normalizes" in alone
    assert "prompt_rewriter: [normalize, redact]" in alone
    swapped = site.dovetail("explain", "--set", "prompt_rewriter=[redact, normalize]", directory=tmp_path, status=2)
    assert "prompt_rewriter 'redact' must come after the one that normalizes; it comes before 'normalize'" in swapped
    assert "prompt_rewriter: [normalize, redact]" in swapped


def test_the_page_about_plugins_quotes_it(site: Site, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text("utf-8")
    section = page.partition("## A kind of your own\n")[2].partition("\n## ")[0]
    sources = [file.read_text("utf-8") for file in (EXAMPLE / "dovetail_prompt_rewriters").glob("*.py")]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert any(block in source for source in sources), block
    lines = section.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("    $ "))
    command, *printed = [line[4:] for line in lines[start:][: lines[start:].index("")]]
    said = site.dovetail(*shlex.split(command.removeprefix("$ dovetail ")), directory=tmp_path, status=2)
    assert said.splitlines() == printed


SCRIPT = """
import json
import httpx
from dovetail.llm import LLM
from dovetail.registry import setup
from dovetail.sampling_params import SamplingParams
from dovetail.server.launch import running_server

WRITTEN, MEANT = "Write to ada@example.org: the cafe\\u0301", "Write to [redacted]: the caf\\u00e9"
greedy = SamplingParams(max_new_tokens=8, temperature=0)
rewriters = ["normalize", "redact"]

def chat(text):
    return [{"role": "system", "content": "ada@example.org"}, {"role": "user", "content": text}]

found = {}
for name, given in (("plain", "none"), ("rewritten", rewriters)):
    llm = LLM("tiny", device="cpu", prompt_rewriter=given)
    prompts = [WRITTEN, MEANT]
    found[name] = {
        "prompts": [output.prompt_ids for output in llm.generate(prompts, greedy)],
        "chats": [llm.chat(chat(text), greedy).prompt_ids for text in prompts],
    }
    llm.close()
config, registry = setup([], ["server.port=0", "device=cpu", f"prompt_rewriter={json.dumps(rewriters)}"])
with running_server(config, registry) as url:
    def ask(path, body):
        answer = httpx.post(url + path, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()
    found["served"] = [
        ask("/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0})
        for text in (WRITTEN, MEANT)
    ]
    found["chats"] = [
        ask("/v1/chat/completions", {"model": "tiny", "messages": chat(text), "max_tokens": 8, "temperature": 0})
        for text in (WRITTEN, MEANT)
    ]
    found["info"] = httpx.get(url + "/server_info").json()["engine"]["resolved"]["lists"]
print(json.dumps(found))
"""


def test_prompts_are_rewritten_in_an_llm_and_in_a_server(site: Site, tmp_path: Path) -> None:
    found = json.loads(site.run(["-c", SCRIPT], tmp_path).splitlines()[-1])
    for key in ("prompts", "chats"):
        written, meant = found["plain"][key]
        assert written != meant
        assert found["rewritten"][key] == [meant, meant]
    for written, meant in (found["served"], found["chats"]):
        assert written["choices"] == meant["choices"]
        assert written["usage"]["prompt_tokens"] == meant["usage"]["prompt_tokens"]
    details = found["chats"][1]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0, "it is the prompt that was just computed"
    assert [part["name"] for part in found["info"]["prompt_rewriter"]] == ["normalize", "redact"]


def test_it_passes_its_own_suite(site: Site, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "source")
    printed = site.dovetail("plugins", "check", str(tmp_path / "source"), directory=tmp_path)
    assert re.search(r"prompt_rewriter/normalize: \d+ passed, 0 failed", printed)
    assert "proven: prompt_rewriter.idempotent, prompt_rewriter.normalizes" in printed
    assert re.search(r"prompt_rewriter/redact: \d+ passed, 0 failed", printed)
    assert "claimed, not proven" not in printed


def test_a_component_of_the_kind_can_be_begun(site: Site, tmp_path: Path) -> None:
    site.dovetail("plugins", "new", "prompt-rewriter", "squeeze", directory=tmp_path)
    source = tmp_path / "dovetail-squeeze"
    registered = (source / "dovetail_squeeze" / "plugin.py").read_text()
    assert 'kind=ComponentKind("prompt_rewriter")' in registered
    assert 'Feature("prompt_rewriter.idempotent")' in registered
    ruff = [sys.executable, "-m", "ruff", "check", "--quiet", "--no-cache", str(source)]
    assert subprocess.run(ruff, check=False).returncode == 0
    both = Site(tmp_path / "both")
    shutil.copytree(site.folder, both.folder)
    install(source, both.folder)
    checked = both.dovetail("plugins", "check", str(source), directory=tmp_path)
    assert "proven: prompt_rewriter.idempotent" in checked
    (sets,) = re.findall(r"^    dovetail generate .*?(--set .*)$", (source / "README.md").read_text(), re.M)
    explained = json.loads(both.dovetail("explain", "--json", *shlex.split(sets), directory=tmp_path))
    assert explained["config"]["prompt_rewriter"] == {"kind": "squeeze", "keep_lines": False}
