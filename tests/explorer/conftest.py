"""A server for the tests of this folder."""

from collections.abc import Iterator

import pytest

from multihead.explorer import serve
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_package
from tests.explorer.client import Client


@pytest.fixture(scope="session")
def session() -> Session:
    return Session(of_package())


@pytest.fixture(scope="session")
def server(session: Session) -> Iterator[Client]:
    session.prepare()
    with serve.start(session, port=0, browser=False) as running:
        yield Client(running.url)
