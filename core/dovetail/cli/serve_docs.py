"""Write docs/cli.md: ``python -m dovetail.cli.serve_docs > docs/cli.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.cli import EXIT_STATUS
from dovetail.cli.serve_flags import FLAGS
from dovetail.cli.serve_refused import REFUSED

_INTRODUCTION = """\
# Command line

<!-- Written by `python -m dovetail.cli.serve_docs`; a test compares. -->

    dovetail serve tiny                                    # a model: a name, or a directory
    dovetail serve ./my-model --port 8000 --tp 2           # the flags below
    dovetail serve server.yaml --max-num-seqs 64           # a config file, and a flag that overrides it
    dovetail serve tiny --set grammar.timeout=5            # any other key of the config
    dovetail config show server.yaml --max-num-seqs 64     # the config that results
    dovetail explain server.yaml --max-num-seqs 64         # what it chooses, and why

`config show`, `config hash`, `explain` and `doctor` take the same arguments as `serve`. `generate`, `chat`, `ab` and `bench` take the flags about the model and the engine, except those that\nthey have with a meaning of their own (`--seed`). Arguments that end in `.yaml`, `.yml`, `.toml` or `.json` are config files; another argument is the model. Flags override `--set`, which
overrides the environment and files ([config.md](config.md)). Names of flags may be written with underscores. Two flags that set one key to
different values are an error, and so is a flag that is not known.

`dovetail COMMAND --help` describes each command: `serve`, `generate`, `chat`, `explain`, `doctor`, `ab`, `bench`, `config`, `keys`, `plugins`.
`dovetail --install-completion` installs completion of commands and flags for the shell that runs it (bash, zsh, fish, PowerShell);
`dovetail --show-completion` prints the script.
"""

_KEY = """\
`--api-key` makes a key file with one admin, which holds the digest of the key. For several tenants, limits, and keys that are not in the list of
processes, use a key file ([tenants.md](tenants.md)).

The numbers of SGLang's `--speculative-` flags mean what they mean there: `--speculative-num-draft-tokens` counts the token before the
drafts, so that 8 are 7 drafts. `--speculative-config` has vLLM's meaning: EAGLE then drafts chains. Names of other engines are `aliases` in the specs of drafters, and
drafters that offer `draft.tree` draft trees: both hold for drafters of other plugins too.
"""


def cli_docs() -> str:
    """Return the page."""
    groups = dict.fromkeys(flag.group for flag in FLAGS)
    rows = [
        (
            ", ".join(f"`{name}`" for name in flag.names),
            ", ".join(f"`{key}`" for key in _keys(flag.key)),
            flag.help,
            group,
        )
        for group in groups
        for flag in FLAGS
        if flag.group == group
    ]
    parts = [_INTRODUCTION, "## Flags of `dovetail serve`\n"]
    for group in groups:
        of_group = [row[:3] for row in rows if row[3] == group]
        parts.append(f"### {group}\n\n{_table(('flag', 'config key', 'meaning'), of_group)}")
    parts += [_KEY, "## Flags that are refused\n", "The error (status 2) says the same.\n"]
    texts = dict.fromkeys(REFUSED.values())
    refused = [(", ".join(f"`{name}`" for name in REFUSED if REFUSED[name] == text), _sentence(text)) for text in texts]
    parts.append(_table(("flag", "instead"), refused))
    parts += [
        "## Exit status\n",
        _table(("status", "meaning"), [(str(code), text) for code, text in EXIT_STATUS.items()]),
    ]
    parts.append("`dovetail ab` has its own table in [ab.md](ab.md).\n")
    return "\n".join(parts)


def _keys(text: str) -> Sequence[str]:
    return text.split(", ") if text else ()


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].rstrip(".") + "."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    print(cli_docs(), end="")
