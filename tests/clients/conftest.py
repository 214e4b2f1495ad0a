"""Start the server that the clients share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.config import Config
from dovetail.server.launch import running_server

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Start a server of the embedded model as ``dovetail serve`` does."""
    config = Config.model_validate({"threads": 1, "server": {"port": 0, "log_level": "warning"}})
    with running_server(config) as url:
        yield url
