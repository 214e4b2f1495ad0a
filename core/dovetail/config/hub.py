"""Download a model of the Hugging Face hub once, with the package huggingface-hub, or take it from the hub's cache.

Only files that are read are downloaded, never pickles or code. Files that are complete stay in the cache, so that a download that
broke off goes on where it stopped.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dovetail.config.hub_files import (
    INDEX,
    SINGLE,
    HubName,
    folders_with_models,
    gguf_of,
    parse_hub_name,
    small_files,
)
from dovetail.errors import ConfigError

log = logging.getLogger(__name__)

_CACHE_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EIO, errno.EMFILE),
)
_LOG_IN = "log in with an account that may read it (hf auth login), or set HF_TOKEN"


class _Listing(NamedTuple):
    """Hold the files of a repository at a revision, each with its size in bytes. ``reason`` says why they are those of the
    cache instead of the hub's."""

    commit: str
    sizes: Mapping[str, int]
    folder: Path | None = None
    reason: str = ""


@lru_cache(maxsize=32)
def hub_model(text: str, *, weights: bool = True) -> Path:
    """Return what the hub name ``text`` means as a path in the hub's cache: the directory of a snapshot, or a GGUF file. What is
    missing is downloaded; without ``weights`` only the tokenizer and settings. Each process does so once. Raises ``ConfigError``
    with the reason and what to do."""
    name = parse_hub_name(text)
    assert name is not None, text
    listing = _listing(name)
    wanted, main = _wanted(name, listing, weights=weights)
    folder = listing.folder or _fetch(name, listing, wanted)
    missing = [file for file in wanted if not (folder / file).is_file()]
    if missing:
        raise ConfigError(
            f"{', '.join(missing[:3])} of {name.repository} is not in the cache {_cache()}, and the hub cannot be asked "
            f"({listing.reason}); connect to the network once, and start again: the download goes on where it stopped"
        )
    return folder / main if main else folder


def _wanted(name: HubName, listing: _Listing, *, weights: bool) -> tuple[list[str], str]:
    """Return the files to download, and which of them is to be opened, if not their directory."""
    files = listing.sizes
    inner = folders_with_models(files)
    if name.gguf is not None or (weights and not inner and any(file.endswith(".gguf") for file in files)):
        found = gguf_of(name, files)
        return found, found[0]
    small = small_files(files)
    if not weights:
        return small, ""
    if not inner:
        raise ConfigError(f"{name.repository} {_unreadable(files)}")
    wanted = [*small, *(folder + "config.json" for folder in inner)]
    for folder in inner:
        wanted += [folder + SINGLE] if folder + SINGLE in files else _shards(name, listing, folder)
    return list(dict.fromkeys(file for file in wanted if file in files or file.endswith(".safetensors"))), ""


def _unreadable(files: Mapping[str, int]) -> str:
    pickled = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth")))
    if pickled:
        return (
            f"has no {SINGLE} and no {INDEX}, only pickled weights ({', '.join(pickled[:3])}), which could run code; take a "
            "repository with safetensors, or convert them with safetensors.torch.save_file"
        )
    found = ", ".join(sorted(files)[:6]) or "nothing"
    return f"has no {SINGLE}, no {INDEX} and no GGUF file; it has {found}. Give the name of a repository with weights"


def _shards(name: HubName, listing: _Listing, folder: str) -> list[str]:
    """Return the index of a folder's weights and the files that it names."""
    index = folder + INDEX
    file = (listing.folder or _fetch(name, listing, [index])) / index
    try:
        names = set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())
        shards = [folder + shard for shard in sorted(names)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} has no weight_map that names the file of each tensor ({error})") from error
    absent = [file for file in shards if file not in listing.sizes]
    if absent and listing.folder is None:
        raise ConfigError(
            f"{index} of {name.repository} names {', '.join(absent[:3])}, which the repository does not have"
        )
    return [index, *shards]


def _listing(name: HubName) -> _Listing:
    """Ask the hub for the files of a repository, or look into the cache if the hub cannot be reached."""
    from huggingface_hub import HfApi  # pyright: ignore[reportMissingImports]
    from huggingface_hub.errors import (  # pyright: ignore[reportMissingImports]
        HfHubHTTPError,
        OfflineModeIsEnabled,
    )

    try:
        info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
    except Exception as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 500
        cached = _cached(name)
        if status < 500 or cached is None:
            raise ConfigError(_refusal(name, error, in_cache=cached is not None)) from error
        reason = _first_line(error)
        if not isinstance(error, OfflineModeIsEnabled):
            log.warning(
                "the hub does not answer (%s); serving %s as it is in the cache, commit %s",
                reason,
                name.repository,
                cached.name,
            )
        sizes = {
            file.relative_to(cached).as_posix(): file.stat().st_size for file in cached.rglob("*") if file.is_file()
        }
        return _Listing(cached.name, sizes, cached, reason)
    return _Listing(str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()})


def _fetch(name: HubName, listing: _Listing, wanted: list[str]) -> Path:
    """Download the files that are not in the cache yet, and return the snapshot's directory."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportMissingImports]

    folder = _snapshots(name) / listing.commit
    left = [file for file in wanted if not (folder / file).is_file()]
    needed = sum(listing.sizes[file] for file in left)
    try:
        _check_space(name, needed)
        if needed > 100e6:
            log.info(
                "downloading %s, commit %s: %d files, %.1f GB",
                name.repository,
                listing.commit[:12],
                len(left),
                needed / 1e9,
            )
        patterns = [glob.escape(file) for file in wanted]
        return Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=patterns))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_broken(name, error)) from error


def _check_space(name: HubName, needed: int) -> None:
    cache = _cache()
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ConfigError(
            f"{name.repository} needs {needed / 1e9:.2f} GB more in the cache {cache}, where {free / 1e9:.2f} GB are free; "
            "free some, or set HF_HOME to a folder on a larger disk"
        )


def _refusal(name: HubName, error: Exception, *, in_cache: bool) -> str:
    """Return why the hub does not list the repository, and what to do."""
    from huggingface_hub.constants import ENDPOINT  # pyright: ignore[reportMissingImports]
    from huggingface_hub.errors import (  # pyright: ignore[reportMissingImports]
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cached = "; or set HF_HUB_OFFLINE=1 to serve it as it is in the cache" if in_cache else ""
    if isinstance(error, GatedRepoError):
        return (
            f"{name.repository} is gated: accept its terms at {ENDPOINT}/{name.repository}, and then {_LOG_IN}{cached}"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{name.repository} has no revision {name.revision!r}; give a branch, a tag or a commit after @"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{ENDPOINT} has no model {name.repository}, or it is private: check the name, or {_LOG_IN}{cached}. A local "
            "model needs the path of its directory"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return f"{name.repository} is not in the cache {_cache()}, and HF_HUB_OFFLINE forbids to download it; unset it once"
    if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
        return f"{ENDPOINT} refuses {name.repository} ({_first_line(error)}); check the name, or {_LOG_IN}{cached}"
    return (
        f"{name.repository} is not in the cache {_cache()}, and the hub did not deliver it: {ENDPOINT} does not answer "
        f"({_first_line(error)}); check the network and HF_ENDPOINT, or give a directory in Hugging Face layout"
    )


def _broken(name: HubName, error: Exception) -> str:
    """Return why a download ended, and what to do."""
    if isinstance(error, OSError) and error.errno in _CACHE_ERRORS:
        return f"the cache {_cache()} cannot be written: {error}; free some space there, or set HF_HOME to a folder that can be"
    return (
        f"the download of {name.repository} broke off: {_first_line(error)}. What is complete is kept: check the network, and start "
        "again to go on"
    )


def _cached(name: HubName) -> Path | None:
    """Return the snapshot in the cache that was the revision when the hub was last asked."""
    snapshots = _snapshots(name)
    commit = name.revision or "main"
    reference = snapshots.parent / "refs" / commit
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    return snapshots / commit if commit and (snapshots / commit).is_dir() else None


def _snapshots(name: HubName) -> Path:
    return _cache() / f"models--{name.repository.replace('/', '--')}" / "snapshots"


def _cache() -> Path:
    from huggingface_hub import constants  # pyright: ignore[reportMissingImports]

    return Path(constants.HF_HUB_CACHE)


def _first_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
