"""Compare the public signatures of the interfaces with a snapshot, so that every change of a contract is deliberate.

.venv/bin/python -m pytest -q tests/core/test_interface_snapshot.py

After a change that is meant, raise the kind's version in registry/builtin.py and write the snapshot anew:
``.venv/bin/python tests/core/test_interface_snapshot.py``.
"""

import dataclasses
import importlib
import inspect
from pathlib import Path

SNAPSHOT = Path(__file__).parent / "interfaces.snapshot"
MODULES = (
    "attention",
    "expanded",
    "cache",
    "grammar",
    "model",
    "policy",
    "speculative",
    "parsers",
    "api",
    "prompts",
    "features",
    "mesh",
    "executor",
    "logits",
    "quantization",
    "expert_shapes",
    "experts",
    "mixer_shapes",
    "state_space",
    "state_rows",
    "mixer",
    "store",
)


def describe(cls):
    """Return one line for the class, and one for each public member that it defines itself."""
    yield f"{cls.__module__}.{cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"
    if dataclasses.is_dataclass(cls):
        yield from (f"    {f.name}: {f.type}" for f in dataclasses.fields(cls))
        return
    for name, member in vars(cls).items():
        if name.startswith("_") and name != "__init__":
            continue
        mark = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
        if isinstance(member, property):
            yield f"    {mark}property {name}{inspect.signature(member.fget)}"
        elif inspect.isfunction(member):
            yield f"    {mark}{name}{inspect.signature(member)}"
        elif isinstance(member, str):
            yield f"    {name} = {member!r}"


def signatures():
    from dovetail.registry.builtin import KINDS
    from dovetail.registry.specs import ComponentSpec, Constraints, Requirement

    lines = [f"api {kind} {major}.{minor}" for kind, (major, minor) in ((kind.kind, kind.api) for kind in KINDS)]
    for name in MODULES:
        module = importlib.import_module(f"dovetail.interfaces.{name}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                lines += describe(cls)
    for cls in (ComponentSpec, Constraints, Requirement):
        lines += describe(cls)
    return "\n".join(lines) + "\n"


def test_the_contract_is_what_was_agreed():
    assert signatures() == SNAPSHOT.read_text(), "the interfaces changed; see this file's docstring"


if __name__ == "__main__":
    SNAPSHOT.write_text(signatures())
