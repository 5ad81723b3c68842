"""The server as a running thing: its port, its token, the browser, and an end that is clean."""

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
import stat
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from multihead.explorer.server import Guard, make_app
from multihead.explorer.session import Session

PORT = 8421
TRIED = 20  # ports from PORT on, where none was named
SECONDS_TO_ASK = 20.0  # for the lines before the body of a request
LOOPBACK = "127.0.0.1"


class Running:
    """A server that answers. `url` is its address with the token; `close` ends it, and so does the end of a `with`."""

    def __init__(self, server: "_Server", thread: threading.Thread, url: str) -> None:
        self._server, self._thread, self.url = server, thread, url

    def close(self) -> None:
        """End it, and wait until it has ended."""
        self._server.should_exit = True
        self._thread.join(10)

    def wait(self) -> None:
        """Until it is closed, or Ctrl-C."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.2)
        except KeyboardInterrupt:
            self.close()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<the explorer at {self.url}>" if self._thread.is_alive() else "<the explorer, closed>"

    def _repr_html_(self) -> str:
        return f'<a href="{self.url}" target="_blank" rel="noopener">the explorer</a>'


def start(
    session: Session,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    browser: bool = True,
    state: str = "",
    token: str | None = None,
) -> Running:
    """Start a server in a thread of its own, and come back once it answers.

    Args:
        session: what can be explored.
        host: the address to listen at.
        port: which; the first free one from 8421 on unless given, any for 0.
        browser: whether to open the page.
        state: the part of the address after #.
        token: what the page must know; the one in `token_file` unless given.
    """
    listening = listen(host, port)
    token = kept_token() if token is None else token
    server = _Server(_app(session, token, host))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True, name="explorer")
    thread.start()
    while not server.answers.wait(0.05):
        if not thread.is_alive():
            raise RuntimeError("the server ended before it answered")
    running = Running(server, thread, address(host, listening, token, state))
    if browser:
        webbrowser.open(running.url)
    return running


def run(
    session: Session, tell: Callable[[str], None], *, host: str, port: int | None, browser: bool, state: str = ""
) -> None:
    """Serve in this thread until Ctrl-C; `tell` is given the address once it answers."""
    listening = listen(host, port)
    token = kept_token()
    url = address(host, listening, token, state)

    def ready() -> None:
        tell(url)
        if browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    server = _Server(_app(session, token, host), ready)
    try:
        server.run([listening])
    except KeyboardInterrupt:  # uvicorn has ended all it had begun, and raises what it was sent
        pass
    finally:
        listening.close()


def _app(session: Session, token: str, host: str) -> Guard:
    hosts = frozenset() if is_loopback(host) else frozenset({host.lower(), socket.gethostname().lower(), "*"})
    return make_app(session, token, hosts)


class _Patient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's, which lets go of a client that begins a request and does not come to its end; bodies are the app's."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._waiting = self.loop.call_later(SECONDS_TO_ASK, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._waiting.cancel()
        if self.cycle is None or self.cycle.response_complete:  # the lines before the body are not all there
            self._waiting = self.loop.call_later(SECONDS_TO_ASK, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.cancel()
        super().connection_lost(exc)


def _config(app: Guard) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Patient,
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=15,
        timeout_graceful_shutdown=1,
    )


class _Server(uvicorn.Server):
    """uvicorn's, which says when it answers."""

    def __init__(self, app: Guard, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(_config(app))
        self.answers, self._app, self._ready = threading.Event(), app, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.answers.set()
            await asyncio.to_thread(self._ready)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop_work()
        await super().shutdown(sockets)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens; a port that is taken is an error only where it was named."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"host={host!r}: {error}: expected an address of this machine") from error
    choices = [*range(PORT, PORT + TRIED), 0] if port is None else [port]
    for choice in choices:
        made = socket.socket(family, socket.SOCK_STREAM)
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((place[0], choice, *place[2:]))
            made.listen(128)
            return made
        except OverflowError as error:
            made.close()
            raise ValueError(f"port={choice}: expected 0…65535") from error
        except OSError as error:
            made.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise ValueError(f"host={host!r}: expected an address of this machine") from error
            if port is not None or choice == 0:
                raise ValueError(f"port={choice} of {host}: {error.strerror}: expected one that is free") from error
    raise AssertionError("the last choice is any port")


def address(host: str, listening: socket.socket, token: str, state: str) -> str:
    """What to type into a browser."""
    port = listening.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/?token={token}" + (f"#{state}" if state else "")


def token_file() -> Path:
    """Where the token is kept: in the user's own folder for such things."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "multihead" / "token"


def kept_token() -> str:
    """The token of this user on this machine, so that a page that is open goes on after a restart.

    It is kept in a file that only the user can read. Where that cannot be, there is a new one every time.
    """
    file = token_file()
    try:
        found = os.lstat(file)
        private = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
        if stat.S_ISREG(found.st_mode) and private:
            token = file.read_text(encoding="ascii").strip()
            if len(token) == 43 and set(token) <= _LETTERS:
                return token
    except (OSError, UnicodeDecodeError):
        pass
    token = secrets.token_urlsafe(32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(token)
    except OSError:
        pass
    return token


_LETTERS = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def is_interactive() -> bool:
    """Whether a person types the next line: at a prompt of Python's or in a notebook."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules or bool(sys.flags.interactive)
