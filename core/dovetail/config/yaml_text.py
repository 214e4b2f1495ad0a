"""Parse YAML."""

from __future__ import annotations

from typing import Any

import yaml

from dovetail.config.unique_keys import refuse_repeated


class _UniqueKeys(yaml.SafeLoader):
    """Load YAML and refuse a key that is given twice, where PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]  # type: ignore[no-untyped-call]
        refuse_repeated(keys, f"line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """Parse YAML without repeated keys. Raises ``ValueError``."""
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
