"""Test models of the Hugging Face hub against a server on this machine that imitates it. No network is used.

Run: python -m pytest tests/core/test_hub.py
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save

from dovetail import LLM, SamplingParams
from dovetail.cli import main as command_line
from dovetail.config.checkpoint import EMBEDDED, locate
from dovetail.config.hub import hub_model
from dovetail.config.hub_files import HubName, parse_hub_name
from dovetail.config.model import ModelSection
from dovetail.errors import ConfigError
from dovetail.gguf.directory import gguf_files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hub_server import GATED, HubServer, Refusal, hub_server
from tiny_gguf import write_tiny

sys.path.pop(0)

hub_library = pytest.importorskip("huggingface_hub", reason="huggingface-hub is not installed")
TINY = EMBEDDED["tiny"]
UNREAD = (
    "pytorch_model.bin",
    "model.onnx",
    "original/consolidated.00.pth",
    "modeling_x.py",
    "README.md",
    "flax_model.msgpack",
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Return a hub without repositories, and let huggingface-hub use it with an empty cache."""
    from huggingface_hub import constants

    hub_model.cache_clear()
    with hub_server() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "".join([server.url, *template[1:]]))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield server
    hub_model.cache_clear()


@pytest.fixture(scope="module")
def sharded() -> dict[str, bytes]:
    """Return the files of a repository that has the embedded model in three shards, and files that are not read."""
    tensors = load_file(TINY / "model.safetensors")
    names, shards, weight_map = sorted(tensors), {}, {}
    for number in range(3):
        file = f"model-0000{number + 1}-of-00003.safetensors"
        part = names[number::3]
        shards[file] = save({name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    small = {file.name: file.read_bytes() for file in TINY.iterdir() if file.suffix in (".json", ".jinja")}
    unread = dict.fromkeys((*UNREAD, "consolidated.safetensors", "original/model.safetensors"), bytes(1000))
    return {**small, **shards, "model.safetensors.index.json": index, **unread}


def needed(files: dict[str, bytes]) -> set[str]:
    return {name for name in files if name.endswith(".json") or name.startswith("model-0")}


def names_in(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_only_files_that_are_read_are_downloaded_once(hub: HubServer, sharded: dict[str, bytes]) -> None:
    commit = hub.push("org/model", sharded)
    folder = locate("org/model")
    assert folder.name == commit
    assert names_in(folder) == needed(sharded)
    assert all((folder / name).read_bytes() == sharded[name] for name in needed(sharded))
    before = dict(hub.sent)
    assert before == {name: len(sharded[name]) for name in needed(sharded)}
    hub_model.cache_clear()
    assert locate("org/model") == folder
    assert hub.sent == before, "what is in the cache is not downloaded again"


def test_a_model_of_the_hub_generates_as_the_same_one_of_a_directory(hub: HubServer, sharded: dict[str, bytes]) -> None:
    hub.push("org/model", sharded)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
    answers = []
    for path in ("org/model", "tiny"):
        with LLM(path) as llm:
            answers.append(llm.generate(["The capital of France is"], greedy)[0].token_ids)
    assert answers[0] == answers[1]


def test_a_broken_connection_goes_on_where_it_stopped(
    hub: HubServer, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None, time=lambda: 0.0))
    shard = "model-00002-of-00003.safetensors"
    hub.push("org/model", sharded)
    hub.broken[shard] = [100_000, 5000]
    folder = locate("org/model")
    assert (folder / shard).read_bytes() == sharded[shard]
    assert hub.sent[shard] == len(sharded[shard]), "no byte is sent twice"


def test_a_download_that_failed_keeps_complete_files(hub: HubServer, sharded: dict[str, bytes]) -> None:
    shard = "model-00003-of-00003.safetensors"
    commit = hub.push("org/model", sharded)
    hub.commits["org/model"][commit] = Missing(sharded, shard)
    with pytest.raises(
        ConfigError, match=r"the download of org/model broke off: .*What is complete is kept.*start again"
    ):
        locate("org/model")
    before = dict(hub.sent)
    assert before, "other files have arrived"
    hub.commits["org/model"][commit] = sharded
    folder = locate("org/model")
    assert names_in(folder) == needed(sharded)
    complete = {name for name in before if before[name] == len(sharded[name])}
    assert all(hub.sent[name] == before[name] for name in complete)


class Missing(dict[str, bytes]):
    """Hold the files of a commit of which one is listed and cannot be read."""

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        super().__init__(files)
        self.name = name

    def __contains__(self, name: object) -> bool:
        return name != self.name and super().__contains__(name)


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubServer, sharded: dict[str, bytes]) -> None:
    first = hub.push("org/model", sharded | {"config.json": b'{"number": 1}'}, "v1")
    second = hub.push("org/model", sharded | {"config.json": b'{"number": 2}'})
    for name, commit in (("", second), ("@main", second), ("@v1", first), (f"@{first}", first)):
        folder = locate(f"org/model{name}")
        assert folder.name == commit
        assert json.loads((folder / "config.json").read_text()) == {"number": 1 if commit == first else 2}
    with pytest.raises(ConfigError, match=r"org/model has no revision 'v9'; give a branch, a tag or a commit after @"):
        locate("org/model@v9")


def test_refusals_of_the_hub_say_what_to_do(hub: HubServer, sharded: dict[str, bytes]) -> None:
    hub.push("org/gated", sharded)
    hub.refused |= {"org/gated": GATED, "org/strange": Refusal(403, "")}
    for name, said in (
        ("org/gated", rf"org/gated is gated: accept its terms at {hub.url}/org/gated, and then log in .*HF_TOKEN"),
        ("org/absent", rf"{hub.url} has no model org/absent, or it is private: check the name, or log in"),
        ("org/strange", rf"{hub.url} refuses org/strange .*403"),
    ):
        with pytest.raises(
            ConfigError, match=rf"model.path is '{name}', which is not a local directory or file: {said}"
        ):
            locate(name)
    with pytest.raises(ConfigError, match=r"A model that needs no hub: dovetail pull smollm2"):
        locate("org/absent")


def test_without_the_hub_the_cache_is_used(
    hub: HubServer, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    hub.push("org/model", sharded)
    folder = locate("org/model")
    hub.push("org/model", sharded | {"config.json": b"{}"})
    hub.refused["org/model"] = hub.refused["org/other"] = Refusal(503, "")
    hub_model.cache_clear()
    assert locate("org/model") == folder
    assert f"serving org/model as it is in the cache, commit {folder.name}" in caplog.text
    with pytest.raises(ConfigError, match=r"org/other is not in the cache .*does not answer.*check the network"):
        locate("org/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_model.cache_clear()
    caplog.clear()
    assert locate("org/model") == folder
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=r"org/other is not in the cache .*HF_HUB_OFFLINE forbids to download it"):
        locate("org/other")
    (folder / "model-00001-of-00003.safetensors").unlink()
    hub_model.cache_clear()
    with pytest.raises(ConfigError, match=r"model-00001-of-00003.safetensors of org/model is not in the cache"):
        locate("org/model")


def test_repositories_without_readable_weights_say_what_they_have(hub: HubServer, sharded: dict[str, bytes]) -> None:
    hub.push("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"0"})
    hub.push("org/nothing", {"README.md": b"0"})
    hub.push("org/short", {name: data for name, data in sharded.items() if name != "model-00002-of-00003.safetensors"})
    for name, said in (
        ("org/pickled", r"only pickled weights \(pytorch_model.bin\), which could run code"),
        (
            "org/nothing",
            r"has no model.safetensors, no model.safetensors.index.json and no GGUF file; it has README.md",
        ),
        ("org/short", r"names model-00002-of-00003.safetensors, which the repository does not have"),
    ):
        with pytest.raises(ConfigError, match=said):
            locate(name)


def test_a_tokenizer_is_taken_without_weights(hub: HubServer, sharded: dict[str, bytes]) -> None:
    hub.push("org/model", sharded)
    folder = locate("org/model", "model.tokenizer")
    assert names_in(folder) == {name for name in sharded if name.endswith(".json")}


def test_a_folder_with_a_model_of_its_own_comes_along(hub: HubServer, sharded: dict[str, bytes]) -> None:
    drafter = {"eagle3/config.json": b"{}", "eagle3/model.safetensors": b"0", "onnx/config.json": b"{}"}
    hub.push("org/model", sharded | drafter)
    assert names_in(locate("org/model")) == needed(sharded) | {"eagle3/config.json", "eagle3/model.safetensors"}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("gguf")
    quantized = write_tiny(folder / "q.gguf", quantized=True).read_bytes()
    plain = write_tiny(folder / "f.gguf", quantized=False).read_bytes()
    return {"tiny-Q8_0.gguf": quantized, "tiny-F32.gguf": plain, "mmproj-F16.gguf": b"0", "README.md": b"0"}


@pytest.mark.parametrize(
    "name", ["org/t-GGUF:Q8_0", "org/t-GGUF:q8_0", "org/t-GGUF/tiny-Q8_0.gguf", "hf.co/org/t-GGUF@main:Q8_0"]
)
def test_a_gguf_file_is_chosen_by_its_label_or_its_name(hub: HubServer, gguf: dict[str, bytes], name: str) -> None:
    hub.push("org/t-GGUF", gguf)
    (file,) = gguf_files(locate(name))
    assert file.read_bytes() == gguf["tiny-Q8_0.gguf"]
    assert set(hub.sent) == {"tiny-Q8_0.gguf"}


def test_a_gguf_name_that_is_not_clear_lists_what_there_is(
    hub: HubServer, gguf: dict[str, bytes], sharded: dict[str, bytes]
) -> None:
    hub.push("org/t", gguf)
    hub.push("org/one", {"only-Q8_0.gguf": gguf["tiny-Q8_0.gguf"]})
    hub.push("org/model", sharded)
    with pytest.raises(
        ConfigError, match=r"several GGUF files: tiny-F32.gguf, tiny-Q8_0.gguf; .*or the file: org/t/tiny-F32.gguf"
    ):
        locate("org/t")
    with pytest.raises(ConfigError, match=r"has no GGUF file that 'Q4_K_M' names: tiny-F32.gguf, tiny-Q8_0.gguf"):
        locate("org/t:Q4_K_M")
    with pytest.raises(ConfigError, match=r"org/model has no GGUF files; leave out 'Q8_0'"):
        locate("org/model:Q8_0")
    assert gguf_files(locate("org/one"))[0].read_bytes() == gguf["tiny-Q8_0.gguf"]
    assert not hub.sent.keys() - {"only-Q8_0.gguf"}


def test_all_parts_of_a_split_gguf_file_are_downloaded(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [f"Q4_K_M/big-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    hub.push("org/big", dict.fromkeys(parts, b"part") | {"Q8_0/big-Q8_0.gguf": b"other"})
    for name in ("org/big:Q4_K_M", f"org/big/{parts[1]}"):
        hub_model.cache_clear()
        file = hub_model(name)
        assert [one.name for one in sorted(file.parent.iterdir())] == [Path(part).name for part in parts]
        assert file.name == Path(parts[0]).name


def test_a_cache_that_cannot_be_written_is_named(
    hub: HubServer, sharded: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.push("org/model", sharded)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
        with pytest.raises(
            ConfigError, match=r"needs 0.0\d GB more in the cache .*where 0.00 GB are free; .*set HF_HOME"
        ):
            locate("org/model")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(ConfigError, match=rf"the cache {tmp_path}/file/hub cannot be written: .*set HF_HOME"):
        locate("org/model")

    def full(*given: object, **more: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_library, "snapshot_download", full)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match=r"cannot be written: .*No space left on device; free some space there"):
        locate("org/model")


def test_two_processes_download_at_once(hub: HubServer, sharded: dict[str, bytes], tmp_path: Path) -> None:
    hub.push("org/model", sharded)
    code = "from dovetail.config.checkpoint import locate; print(locate('org/model'))"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    env = {name: value for name, value in env.items() if name != "HF_HUB_CACHE"}
    running = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "12"]
    found = {process.communicate(timeout=60)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    (folder,) = map(Path, found)
    assert {name: (folder / name).read_bytes() for name in names_in(folder)} == {
        name: sharded[name] for name in needed(sharded)
    }


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as status:
            command_line(list(arguments))
        assert status.value.code == 0
        return capsys.readouterr().out

    return call


def test_pull_downloads_ahead_and_models_lists_it(
    hub: HubServer,
    gguf: dict[str, bytes],
    sharded: dict[str, bytes],
    tmp_path: Path,
    monkeypatch,
    run: Callable[..., str],
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    first = hub.push("org/model", sharded, "v1")
    hub.push("org/model", sharded | {"README.md": b"1"})
    hub.push("org/t", gguf)
    for name in ("org/model", "org/model@v1", "org/t:Q8_0"):
        assert f"dovetail serve {name}" in run("pull", name)
    rows = {row["name"]: row["where"] for row in json.loads(run("models", "--json"))}
    here = {name for name, where in rows.items() if where == "hub's cache"}
    assert here == {"org/model", f"org/model@{first}", "org/t/tiny-Q8_0.gguf"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name", None, None)),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3", None)),
        ("org/name@v1:Q8_0", HubName("org/name", "v1", "Q8_0")),
        ("hf.co/org/name:Q8_0", HubName("org/name", None, "Q8_0")),
        ("org/name/part/m.gguf", HubName("org/name", None, "part/m.gguf")),
        ("models/m.gguf", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("../name", None),
        ("org/name/more", None),
        ("name", None),
        ("org/name:", None),
    ],
)
def test_names_of_the_hub(text: str, expected: HubName | None) -> None:
    assert parse_hub_name(text) == expected


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/name", "name"),
        ("org/name@v1", "name"),
        ("org/name@refs/pr/3:Q8_0", "name:Q8_0"),
        ("org/name/part/m.gguf", "m"),
    ],
)
def test_the_served_name_has_no_revision(path: str, name: str) -> None:
    assert ModelSection(path=path).name == name
