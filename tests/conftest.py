"""What several test files share."""

from collections.abc import Iterator

import pytest
from forkserver import ForkServer
from pools import WARM


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Runs `dapo` commands without importing everything anew for each."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _warm_processes() -> Iterator[None]:
    """Whatever engine processes tests have started and shared, end with the last of them."""
    yield
    WARM.close()
