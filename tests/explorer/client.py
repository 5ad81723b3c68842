"""A plain client of the explorer's server, which sends what it is told to, wrong headers included."""

import http.client
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from multihead.explorer.wire import Answer

SENTENCE = {"kind": "text", "text": "I love pepperoni pizza"}
TRACE = {"model": "lm", "layer": 0, "input": SENTENCE}


class Client:
    """Talks to one server; `token` is that of its address."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname, parts.port
        self.token = parse_qs(parts.query)["token"][0]

    def raw(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body of any request; `_` in a header's name stands for `-`."""
        connection = http.client.HTTPConnection(self.host or "", self.port, timeout=60)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, route: str, request: Any, **headers: str) -> tuple[int, Any]:
        """The status, and the answer or what the refusal says."""
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        status, _, data = self.raw("POST", f"/api/{route}", body, **{"X_Multihead_Token": self.token, **headers})
        return status, Answer.from_bytes(data) if status == 200 else json.loads(data)
