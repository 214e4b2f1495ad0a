"""Choose the cases of conformance suites that `make test` leaves to `make test-full`: they get the mark ``full``.

Each test of each suite is in the usual run, at least once for each class except those of models. What is left out are the other
cases of

- models: of a class with several configs, the usual run has all tests of the first, and of the others those of ``EVERY_CONFIG``;
- models: the first class of a file has all tests of the suite, and each of the others has those of ``EVERY_CONFIG``, its own, and a
  third of the rest, such that each test is in a third of these classes;
- classes and tests with ``pytest.mark.sample(n)``: suites that run again for a component that another class tests whole, or for one of
  several backends or ranks; kernels that are slow where they are interpreted or compiled; and combinations of drafters, ways to cut
  prompts and random traffic, of which each value is in a case;
- backends of attention: the types of numbers that the component does not allow, and what ``is_slow`` of a class names, all of
  which would be skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from dovetail.testing.attention import AttentionSuite
from dovetail.testing.model import LONG_CHUNK, ModelSuite

EVERY_CONFIG = {
    "test_its_checkpoints_select_it",
    "test_logits_are_those_of_the_reference",
    "test_the_weight_map_is_complete",
}
"""Tests of models that every config has: which component reads it, the mathematics, and its tensors."""
SHARED_BY = 3
"""Of the classes of a file after the first, one of this number has each of the other tests."""
CHUNKS = (LONG_CHUNK, 7)
"""The chunks in which the logits of every config are computed."""


def add_full(items: Sequence[pytest.Item]) -> None:
    """Mark what the usual run leaves out as ``full``."""
    for chosen in (_other_configs, _other_models, _skipped, _not_sampled):
        for item in chosen([item for item in items if item.get_closest_marker("full") is None]):
            item.add_marker(pytest.mark.full)


def _other_configs(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    for item, suite, params in _of(items, ModelSuite):
        if params.get("case", first := next(iter(suite.configs), None)) == first:
            continue
        if item.originalname not in EVERY_CONFIG or params.get("chunk", LONG_CHUNK) not in CHUNKS:
            yield item


def _other_models(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Take the tests of ``ModelSuite`` that a class of a model leaves to others of its file: other ones for each class."""
    models: dict[object, dict[type, dict[str, int]]] = {}
    for item, suite, _ in _of(items, ModelSuite):
        of_file = models.setdefault(item.path, {})
        names = of_file.setdefault(suite, {})
        place, number = list(of_file).index(suite), names.setdefault(item.originalname, len(names))
        if item.originalname in EVERY_CONFIG or not hasattr(ModelSuite, item.originalname):
            continue
        if place and (place + number) % SHARED_BY:
            yield item


def _not_sampled(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Take every n-th case, so that each value of a parameter is in one of them if n and the number of values have no
    common divisor."""
    seen: Counter[tuple[pytest.Collector, str]] = Counter()
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        key = item.parent, item.originalname
        if seen[key] % mark.args[0]:
            yield item
        seen[key] += 1


def _skipped(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    for item, suite, params in _of(items, AttentionSuite):
        made = suite()
        if hasattr(suite, "is_slow") and suite.is_slow(item.originalname, params):
            yield item
            continue
        dtypes, kv_dtypes = made.allowed_dtypes(), made.constraints.kv_dtypes
        allowed = params.get("dtype", dtypes[0]) in dtypes
        if not allowed or ("kv_dtype" in params and kv_dtypes and params["kv_dtype"] not in kv_dtypes):
            yield item


def _of(items: Sequence[pytest.Item], kind: type) -> Iterator[tuple[pytest.Function, type, dict[str, object]]]:
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and issubclass(item.cls, kind):
            yield item, item.cls, item.callspec.params if hasattr(item, "callspec") else {}
