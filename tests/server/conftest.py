import sys

import pytest

from tests.checkpoints import save_fake_checkpoint
from tests.server.live import LiveServer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("fake") / "model")


@pytest.fixture(scope="session")
def server(folder):
    """Shared by all tests that leave it as they found it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # client and server are threads of one process here and wait for each other
    with LiveServer(folder) as live:
        yield live
    sys.setswitchinterval(interval)


@pytest.fixture(scope="session")
def client(server):
    with server.client() as client:
        yield client
