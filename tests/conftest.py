"""What several test files share."""

from collections.abc import Iterator

import pytest
from forkserver import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Runs `dapo` commands without importing everything anew for each."""
    server = ForkServer()
    yield server
    server.close()
