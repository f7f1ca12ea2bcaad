import sys
from contextlib import contextmanager

import pytest

from tests.checkpoints import save_fake_checkpoint
from tests.server.live import LiveServer
from tests.server.serving import serving_process
from tests.server.victim import Victim


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


@pytest.fixture(scope="module")
def victim(server):
    """Streams of another client, which what the module sends must not disturb."""
    thread = Victim(server.url)
    thread.start()
    yield thread
    thread.ended.set()
    thread.join(20)
    assert thread.failure is None, f"a stream was disturbed: {thread.failure!r}"
    assert thread.count > 0
    server.wait_idle(20)


@pytest.fixture(scope="session")
def bundled_server():
    """`pageserve serve` as a user starts it, with the bundled model: its URL."""
    with serving() as url:
        yield url


@contextmanager
def serving(*options: str):
    """The URL of `pageserve serve` with these options, once it is ready."""
    with serving_process(*options) as (url, _):
        yield url
