"""The explorer's server: who may ask, how much, and for how long. What is computed is `session`'s.

`GET /` and the page's own files, from a table made at the start, need no token: they say nothing. `POST /api/ROUTE`
takes JSON (`/api/picture?model=vit` the bytes of a picture), needs the header X-Multihead-Token, and answers in the
wire format, or with {"error": a sentence, "kind": a word} and a status of 400 and above.

Every request, websockets included, must name this host and, where a browser says so, come from its own page: a page of
another site can then neither read answers (same origin) nor reach us by another name (DNS rebinding).
"""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multihead.explorer.export import page_files, served_page, single_file
from multihead.explorer.request import Refused
from multihead.explorer.session import Session, Stop, Stopped

MOST_BYTES = 2**20  # of a request: the pixels of a picture of 448 × 448 and three colours fit
MOST_PICTURE_BYTES = 10 * 10**6
MOST_WAITING = 64  # requests at once, one of which is computed
SECONDS_TO_SEND = 20.0  # for the body of a request
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def make_app(session: Session, token: str, hosts: frozenset[str] = frozenset()) -> "Guard":
    """The server as an ASGI application.

    Args:
        session: what can be explored.
        token: what the page must know.
        hosts: names beside loopback ones under which it may be asked for.
    """
    page = page_files(*TYPES)
    page["index.html"] = served_page(page["index.html"].decode()).encode()
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="explorer")
    quick = ThreadPoolExecutor(max_workers=2, thread_name_prefix="explorer-quick")
    running: set[Stop] = set()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        worker.shutdown(wait=True, cancel_futures=True)
        quick.shutdown(wait=True, cancel_futures=True)

    async def send_file(http: Http) -> Response:
        path = http.path_params["path"] or "index.html"
        if path not in page:  # looked up, never opened
            return refusal(Refused("there is no such page: expected /", "missing", 404))
        media = TYPES[path[path.rindex(".") :]]
        return Response(page[path], media_type=f"{media}; charset=utf-8", headers={"Cache-Control": "no-cache"})

    async def answer(http: Http) -> Response:
        route = http.path_params["route"]
        try:
            if not hmac.compare_digest(http.headers.get("x-multihead-token", "").encode(), token.encode()):
                raise Refused("the token is not the server's: expected the address that it printed", "token", 401)
            if route == "picture":
                data = await body_of(http, MOST_PICTURE_BYTES)
                model = http.query_params.get("model", "")
                return await work(http, worker, lambda stop: session.picture(model, data, stop))
            given = parsed(await body_of(http, MOST_BYTES))
            kept = session.kept(route, given)
            if kept is not None:
                return binary(kept)
            if route == "save":
                return await work(http, worker, lambda stop: single_file(session, given, stop).encode(), "text/html")
            pool = quick if route in ("tokens", "models") else worker
            return await work(http, pool, lambda stop: session.respond(route, given, stop))
        except Refused as error:
            return refusal(error)
        except ClientDisconnect:
            return Response(status_code=499)

    async def work(
        http: Http, pool: ThreadPoolExecutor, compute: Callable[[Stop], bytes], media: str | None = None
    ) -> Response:
        """Compute in a thread, for as long as the client waits for it."""
        if len(running) >= MOST_WAITING:
            raise Refused(f"{len(running)} requests wait already: expected you to try again soon", "busy", 503)
        stop = Stop()
        running.add(stop)
        job: asyncio.Future[Any] = asyncio.ensure_future(
            asyncio.get_running_loop().run_in_executor(pool, compute, stop)
        )
        gone: asyncio.Future[Any] = asyncio.ensure_future(left(http))
        try:
            await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not job.done():
                stop.set()
                return Response(status_code=499)  # nobody reads it
            return binary(job.result(), media)
        except Stopped:
            return Response(status_code=499)
        except Refused:
            raise
        except MemoryError as error:
            raise Refused("there is not enough memory for this: expected a shorter input", "large", 413) from error
        except Exception as error:  # of a model of the user's own, perhaps: a sentence, and the server goes on
            raise Refused(f"{type(error).__name__}: {error}"[:500], "bug", 500) from error
        finally:
            gone.cancel()
            running.discard(stop)
            job.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, so that nobody reports it

    routes = [
        Route("/api/{route}", answer, methods=["POST"]),
        Route("/{path:path}", send_file, methods=["GET", "HEAD"]),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), hosts, running)


async def left(http: Http) -> None:
    """Returns when the client has gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def body_of(http: Http, most: int) -> bytes:
    """The body of a request, if it is small enough and comes in time."""
    said = http.headers.get("content-length", "0")
    if not said.isdigit() or int(said) > most:
        raise Refused(f"the request has {said[:20]} bytes: expected at most {most:,}", "large", 413)
    parts, count = [], 0
    try:
        async with asyncio.timeout(SECONDS_TO_SEND):
            async for part in http.stream():
                count += len(part)
                if count > most:
                    raise Refused(f"the request has more than {most:,} bytes: expected at most that", "large", 413)
                parts.append(part)
    except TimeoutError as error:
        raise Refused(f"the request took more than {SECONDS_TO_SEND:.0f} s to arrive", "slow", 408) from error
    return b"".join(parts)


def parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not JSON: {str(error)[:100]}") from error


def binary(data: bytes, media: str | None = None) -> Response:
    headers = {"Cache-Control": "no-store"}
    if media == "text/html":  # never shown under our origin: it is a file to keep
        headers["Content-Disposition"] = 'attachment; filename="multihead.html"'
    return Response(data, media_type=media or "application/octet-stream", headers=headers)


def refusal(error: Refused) -> Response:
    said = {"error": str(error), "kind": error.kind}
    return JSONResponse(said, error.status, headers={"Cache-Control": "no-store"})


class Guard:
    """Refuses what does not name this host or comes from another's page, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str], running: set[Stop]) -> None:
        self.app, self.hosts, self._running = app, hosts, running

    def stop_work(self) -> None:
        """Stop all that is being computed: the server ends."""
        for stop in list(self._running):
            stop.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []),
                    *((name.lower().encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        why = self.objection(scope["headers"])
        if scope["type"] == "websocket":  # there is none: closed before it opens, whoever asks
            await send({"type": "websocket.close", "code": 1008, "reason": why or "there is no websocket here"})
        elif why is not None:
            await refusal(Refused(why, "forbidden", 403))(scope, receive, guarded)
        else:
            await self.app(scope, receive, guarded)

    def objection(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        """Why a request with these headers is refused, or None."""
        found = {name: [v.decode("latin-1") for n, v in headers if n == name] for name in (b"host", b"origin")}
        if len(found[b"host"]) != 1 or not self.is_ours(found[b"host"][0]):
            given = found[b"host"][0][:60] if found[b"host"] else "none"
            return f"the request is for the host {given!r}: expected the address that the server printed"
        own = {f"http://{found[b'host'][0].lower()}", f"https://{found[b'host'][0].lower()}"}
        if any(origin.lower() not in own for origin in found[b"origin"]):
            return f"the request comes from {found[b'origin'][0][:60]!r}: expected this server's own page"
        fetched = {n: v for n, v in headers if n in (b"sec-fetch-site", b"sec-fetch-mode")}
        elsewhere = fetched.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        if elsewhere and fetched.get(b"sec-fetch-mode") != b"navigate":  # a link to the page may stand anywhere
            return "the request comes from another site: expected this server's own page"
        return None

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this machine: loopback, or what `--host` added; any port, for tunnels."""
        name, colon, port = host.lower().rpartition(":") if not host.endswith("]") else (host.lower(), "", "")
        if not colon:
            name = host.lower()
        elif not port.isdigit():
            return False
        name = name.removeprefix("[").removesuffix("]") if name.startswith("[") else name
        if name == "localhost" or name in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or "*" in self.hosts  # a number cannot be rebound
