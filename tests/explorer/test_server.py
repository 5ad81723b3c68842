"""Who may ask the server, how much and for how long: a test for each promise of docs/explorer.md about security.

Longer than other files because it has a test for each promise of one page of the documentation.
"""

import concurrent.futures
import http.client
import io
import json
import re
import socket
import struct
import threading
import time
import zlib

import pytest
import torch
from PIL import Image

import multihead as mh
from multihead.explorer import serve
from multihead.explorer import server as module
from multihead.explorer.packaged import Example
from multihead.explorer.session import Session
from tests.explorer.client import SENTENCE, TRACE, Client

PATHS = ["/", "/main.js", "/style.css", "/nothing", "/api/models"]


# The token -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route", ["models", "tokens", "trace", "weights", "heads", "predict", "decode", "save", "picture"]
)
@pytest.mark.parametrize("token", [None, "", "wrong", "é"])
def test_nothing_computes_without_the_token(server: Client, route: str, token: str | None) -> None:
    headers = {} if token is None else {"X_Multihead_Token": token}
    status, _, body = server.raw("POST", f"/api/{route}", b"{}", **headers)
    assert status == 401
    assert json.loads(body)["kind"] == "token"


def test_a_token_in_the_query_of_a_route_is_not_enough(server: Client) -> None:
    status, _, _ = server.raw("POST", f"/api/models?token={server.token}", b"{}")
    assert status == 401


def test_the_page_itself_says_nothing_and_needs_none(server: Client) -> None:
    status, _, body = server.raw("GET", "/")
    assert status == 200
    assert server.token.encode() not in body


# Host and Origin -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "", "a:b"]
)
def test_another_host_is_refused_on_every_route(server: Client, path: str, method: str, host: str) -> None:
    status, _, body = server.raw(method, path, None, Host=host, X_Multihead_Token=server.token)
    assert status == 403, (host, body)
    assert "expected the address that the server printed" in json.loads(body)["error"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "localhost:9999", "LOCALHOST:1", "127.0.0.1:9000"])
def test_loopback_under_any_port_is_ours(server: Client, host: str) -> None:
    assert server.raw("GET", "/", None, Host=host)[0] == 200  # an ssh tunnel comes by another port


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil", "file://"]
)
def test_another_origin_is_refused_on_every_route(server: Client, path: str, origin: str) -> None:
    for method in ("GET", "POST"):
        status, _, body = server.raw(method, path, b"{}", Origin=origin, X_Multihead_Token=server.token)
        assert status == 403, (method, body)
        assert "expected this server's own page" in json.loads(body)["error"]


def test_its_own_origin_is_welcome(server: Client) -> None:
    status, _ = server.post("models", {}, Origin=f"http://127.0.0.1:{server.port}")
    assert status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_may_link_to_the_page_and_nothing_else(server: Client, site: str) -> None:
    """A browser sends no Origin with a script or a picture that another site asks for."""
    for path, mode in (("/main.js", "no-cors"), ("/api/models", "cors"), ("/icon.svg", "no-cors")):
        method = "POST" if path.startswith("/api") else "GET"
        asked = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "X_Multihead_Token": server.token}
        status, _, body = server.raw(method, path, b"{}" if method == "POST" else None, **asked)
        assert status == 403, (path, body)
    assert server.raw("GET", "/", None, **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate"})[0] == 200


def test_no_host_and_two_hosts_are_refused(server: Client) -> None:
    for lines in (b"", b"Host: 127.0.0.1\r\nHost: evil.example\r\n"):
        with socket.create_connection((server.host, server.port), timeout=20) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n" + lines + b"Connection: close\r\n\r\n")
            assert plain.recv(4096).split()[1] in (b"400", b"403")


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1"])
def test_websockets_are_closed_before_they_open(server: Client, origin: str) -> None:
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    status, _, _ = server.raw("GET", "/api/trace", None, Origin=origin, **upgrade)
    assert status in (403, 404, 405)


def test_a_websocket_scope_is_closed_with_the_reason() -> None:
    import asyncio

    sent = []

    async def ask() -> None:
        app = module.make_app(Session([Example()]), "t")
        scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"evil.example")]}
        await app(scope, lambda: asyncio.sleep(0), lambda m: asyncio.sleep(0, sent.append(m)))

    asyncio.run(ask())
    assert sent[0]["type"] == "websocket.close"
    assert "evil.example" in sent[0]["reason"]


# Headers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, "/%00", "/..%2f..%2fetc/passwd"])
def test_every_answer_has_the_strict_headers(server: Client, path: str) -> None:
    for method in ("GET", "POST", "PUT", "OPTIONS"):
        _, headers, _ = server.raw(method, path)
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'self'" in policy
        assert "*" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


# Files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/..%2fserver.py", "/%2e%2e/server.py", "//etc/passwd", "/etc/passwd", "/server.py", "/steps/../../wire.py",
     "/..\\server.py", "/%00", "/index.html%00.js", "/file:///etc/passwd", "/steps", "/steps/"],
)  # fmt: skip
def test_no_path_reaches_the_file_system(server: Client, path: str) -> None:
    status, _, body = server.raw("GET", path)
    assert status == 404
    assert b"import" not in body
    assert b"root:" not in body


@pytest.mark.parametrize("name", ["../lm", "/etc/passwd", "bag.png", "samples/bag", "..", "\x00"])
def test_no_name_in_a_request_is_a_path(server: Client, name: str) -> None:
    status, said = server.post("trace", {"model": "vit", "layer": 0, "input": {"kind": "sample", "name": name}})
    assert (status, said["kind"]) == (400, "input")
    status, said = server.post("trace", {**TRACE, "model": name})
    assert (status, said["kind"]) == (404, "missing")


def test_the_page_is_served_with_its_types(server: Client) -> None:
    for path, media in (
        ("/", "text/html"),
        ("/main.js", "text/javascript"),
        ("/style.css", "text/css"),
        ("/icon.svg", "image/svg+xml"),
    ):
        status, headers, _ = server.raw("GET", path)
        assert status == 200
        assert headers["content-type"].startswith(media)


# Limits ----------------------------------------------------------------------------------------------------------------


def test_a_request_that_is_too_large_is_refused_before_it_is_read(server: Client) -> None:
    status, said = server.post("tokens", b" " * (module.MOST_BYTES + 1))
    assert (status, said["kind"]) == (413, "large")


def test_a_request_that_hides_its_length_is_refused_too(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 64 * 1024)
    connection = http.client.HTTPConnection(server.host or "", server.port, timeout=30)
    try:
        chunks = (b"x" * 4096 for _ in range(20))
        connection.request("POST", "/api/tokens", chunks, {"X-Multihead-Token": server.token}, encode_chunked=True)
        assert connection.getresponse().status == 413
    finally:
        connection.close()


def test_a_long_text_is_refused_in_words(server: Client) -> None:
    status, said = server.post("tokens", {"model": "lm", "text": "a" * 20_001})
    assert (status, said["kind"]) == (413, "large")
    assert "at most 20,000" in said["error"]
    status, said = server.post("trace", {**TRACE, "input": {"kind": "text", "text": "word " * 1000}})
    assert status == 413
    assert "expected at most 256" in said["error"]


def test_a_client_that_does_not_finish_its_request_is_dropped(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_TO_SEND", 0.3)
    with socket.create_connection((server.host, server.port), timeout=20) as plain:
        head = f"POST /api/tokens HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Multihead-Token: {server.token}\r\nContent-Length: 100\r\n\r\n"
        plain.sendall(head.encode() + b"{")
        assert plain.recv(4096).split()[1] == b"408"


FIRST = b"GET /icon.svg HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "sent"),
    [(b"", b""), (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"), (b"", b"\x16\x03\x01"), (FIRST, b"GET / HT")],
    ids=["nothing", "half a request", "not HTTP", "half a second request"],
)
def test_a_client_that_does_not_come_to_ask_is_dropped(
    session: Session, monkeypatch: pytest.MonkeyPatch, before: bytes, sent: bytes
) -> None:
    monkeypatch.setattr(serve, "SECONDS_TO_ASK", 0.3)
    with serve.start(session, port=0, browser=False) as running:
        port = int(running.url.split(":")[2].split("/")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            if before:
                plain.sendall(before)
                assert plain.recv(4096).startswith(b"HTTP/1.1 200")
            plain.sendall(sent)
            while plain.recv(4096):
                pass


def test_a_computation_that_takes_too_long_is_stopped(
    session: Session, server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Stop", lambda: module_stop(0.0))
    status, said = server.post("trace", {**TRACE, "input": {"kind": "text", "text": "not asked before"}})
    assert (status, said["kind"]) == (504, "slow")
    monkeypatch.undo()
    assert server.post("trace", {**TRACE, "input": {"kind": "text", "text": "not asked before"}})[0] == 200


def module_stop(seconds: float):
    from multihead.explorer.session import Stop

    return Stop(seconds)


MALFORMED = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 50_000, "not JSON"),
    (b"9" * 5000, "not JSON"),
    (b"[]", "expected an object"),
    (b"null", "expected an object"),
    (b'"text"', "expected an object"),
]


@pytest.mark.parametrize(("body", "message"), MALFORMED, ids=lambda v: str(v)[:20])
def test_what_is_no_request_is_refused_in_words(server: Client, body: bytes, message: str) -> None:
    status, said = server.post("trace", body)
    assert (status, said["kind"]) == (400, "input")
    assert message in said["error"]


def test_unknown_routes_and_methods(server: Client) -> None:
    status, said = server.post("paint", {})
    assert (status, said["kind"]) == (404, "missing")
    assert server.raw("GET", "/api/models")[0] == 404
    assert server.raw("DELETE", "/")[0] == 405


# Hostile text and pictures ---------------------------------------------------------------------------------------------

HOSTILE = [
    '<img src=x onerror="alert(1)">',
    "\x1b[31mred\x1b[0m\x07",
    "\u202etxet tfel ot thgir\u202c",
    "half \ud83d a character",
    "zero\u200bwidth\ufeff and \u0000 null",
    "{{template}} ${x} `tick` </script><!--",
    "👩‍👩‍👧 é café",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("model", ["lm", "example"])
def test_hostile_text_is_only_text(server: Client, model: str, text: str) -> None:
    status, answer = server.post("trace", {"model": model, "layer": 0, "input": {"kind": "text", "text": text}})
    assert status == 200
    assert answer.tensors["output"].isfinite().all()
    for token in answer.meta["tokens"]:
        assert all(c.isprintable() for c in token["text"]), token
        assert not set(token["text"]) & set("\u202e\u202c\u200b\ufeff\u200d"), token
    if model == "lm":
        said = bytes.fromhex("".join(token["bytes"] for token in answer.meta["tokens"]))
        assert said == text.encode("utf-8", "replace")


def png(width: int, height: int, data: bytes, text: bytes = b"") -> bytes:
    """A PNG file that claims these sizes, with a packed comment."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    comment = chunk(b"zTXt", b"comment\0\0" + zlib.compress(text)) if text else b""
    body = chunk(b"IHDR", header) + comment + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def picture(server: Client, data: bytes) -> tuple[int, dict]:
    return server.post("picture?model=vit", data)


def test_a_picture_arrives_as_the_model_sees_it(server: Client) -> None:
    sample = mh.models.samples()["bag"].read_bytes()
    status, seen = picture(server, sample)
    assert status == 200
    assert torch.equal(seen.tensors["pixels"] / 255, mh.models.images.read(mh.models.samples()["bag"], 28))
    asked = {"kind": "pixels", "pixels": seen.meta["pixels"]}
    status, answer = server.post("predict", {"model": "vit", "input": asked})
    assert answer.meta["labels"][answer.meta["candidates"][0]]["text"] == "bag"


HOSTILE_PICTURES = {
    "a bomb": png(30_000, 30_000, bytes(1000)),
    "a bomb of text": png(5, 5, bytes(30), text=bytes(100_000_000)),
    "a little more than the limit": png(10_001, 10_001, bytes(1000)),
    "what Pillow would give to Ghostscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    "truncated": mh.models.samples()["bag"].read_bytes()[:200],
    "no picture": b"<svg onload='alert(1)'></svg>",
    "nothing": b"",
    "a page": b"<!doctype html><script>alert(1)</script>",
}


@pytest.mark.parametrize("what", HOSTILE_PICTURES)
def test_hostile_pictures_are_refused_in_words(server: Client, what: str) -> None:
    status, said = picture(server, HOSTILE_PICTURES[what])
    assert status == 400, said
    assert said["kind"] == "input"
    assert "the picture" in said["error"]
    assert "/" not in said["error"].split(":")[0]


def test_a_picture_of_as_many_pixels_as_the_page_says_is_read(server: Client) -> None:
    """Pillow's own warning comes at 89 megapixels, ours at 100."""
    file = io.BytesIO()
    Image.new("L", (10_000, 9_500)).save(file, "JPEG")  # read at a smaller scale
    assert picture(server, file.getvalue())[0] == 200


def test_a_picture_file_that_is_too_large_is_refused(server: Client) -> None:
    status, said = picture(server, bytes(module.MOST_PICTURE_BYTES + 1))
    assert (status, said["kind"]) == (413, "large")


def test_a_large_picture_is_read(server: Client) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3000, 2000), "white").save(file, "JPEG")
    assert picture(server, file.getvalue())[0] == 200


@pytest.mark.parametrize("pixels", ["", "AAAA", "not base64!", "A" * 4_000])
def test_pixels_that_do_not_fit_are_refused(server: Client, pixels: str) -> None:
    status, said = server.post("predict", {"model": "vit", "input": {"kind": "pixels", "pixels": pixels}})
    assert (status, said["kind"]) == (400, "input")


# Many clients, clients that leave, restarts ----------------------------------------------------------------------------


def test_fifty_clients_at_once(server: Client) -> None:
    def ask(number: int) -> bool:
        status, answer = server.post("trace", {**TRACE, "input": {"kind": "text", "text": f"number {number} of fifty"}})
        return status == 200 and answer.tensors["weights"].shape[0] == 8

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        assert all(pool.map(ask, range(50)))


class Slow(Example):
    """The running example in slow motion, which says when it began and whether it was stopped."""

    id, fixed = "slow", False

    def __init__(self) -> None:
        super().__init__()
        self.began, self.stopped, self.let_go = threading.Event(), threading.Event(), threading.Event()
        self.step = torch.nn.Identity()

    def parts(self) -> list[torch.nn.Module]:
        return [self.step]

    def trace(self, items, layer, mask):
        self.began.set()
        try:
            while not self.let_go.wait(0.02):
                self.step(items.data)
        except BaseException:
            self.stopped.set()
            raise
        return super().trace(items, layer, mask)


SLOW = {"model": "slow", "layer": 0, "input": SENTENCE}


def test_work_stops_when_the_client_leaves_and_the_next_is_served() -> None:
    subject = Slow()
    with serve.start(Session([subject]), port=0, browser=False, token="t") as running:
        client = Client(running.url)
        body = json.dumps(SLOW).encode()
        head = f"POST /api/trace HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Multihead-Token: t\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((client.host, client.port)) as plain:
            plain.sendall(head.encode() + body)
            assert subject.began.wait(60)
        assert subject.stopped.wait(10), "the client left, and the work went on"
        subject.let_go.set()
        assert client.post("trace", SLOW)[0] == 200


def test_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 1)
    subject = Slow()
    with serve.start(Session([subject]), port=0, browser=False, token="t") as running:
        client = Client(running.url)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.post, "trace", SLOW)
            assert subject.began.wait(60)
            status, said = client.post("trace", SLOW)
            assert (status, said["kind"]) == (503, "busy")
            subject.let_go.set()
            assert first.result()[0] == 200


def test_a_server_that_ends_stops_its_work() -> None:
    subject = Slow()
    running = serve.start(Session([subject]), port=0, browser=False, token="t")
    client = Client(running.url)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "trace", SLOW)
        assert subject.began.wait(60)
        began = time.monotonic()
        running.close()
        assert time.monotonic() - began < 60  # it does not hang
        assert subject.stopped.wait(60)
        with pytest.raises((http.client.HTTPException, OSError, ValueError)):
            asked.result()


def test_after_a_restart_the_same_address_works() -> None:
    with serve.start(Session([Example()]), port=0, browser=False) as running:
        client = Client(running.url)
        assert client.post("models", {})[0] == 200
    with pytest.raises(OSError, match="refused"):
        client.post("models", {})
    with serve.start(Session([Example()]), port=client.port, browser=False) as again:
        assert again.url == running.url
        assert client.post("models", {})[0] == 200


def test_a_mistake_of_the_models_own_is_a_sentence(server: Client) -> None:
    class Broken(Example):
        id = "broken"

        def trace(self, items, layer, mask):
            raise RuntimeError("out of luck")

    with serve.start(Session([Broken()]), port=0, browser=False, token="t") as running:
        client = Client(running.url)
        status, said = client.post("trace", {"model": "broken", "layer": 0, "input": SENTENCE})
        assert (status, said["kind"]) == (500, "bug")
        assert "out of luck" in said["error"]
        assert client.post("models", {})[0] == 200


def test_the_page_asks_for_all_its_modules_at_once(server: Client) -> None:
    _, _, body = server.raw("GET", "/")
    ahead = re.findall(r'<link rel="modulepreload" href="([^"]+)">', body.decode())
    assert ahead[-1] == "main.js"
    assert len(ahead) > 10
    for path in ahead:
        assert server.raw("GET", f"/{path}")[0] == 200, path
