"""A session: the subjects that can be explored, one computation at a time, answers that are kept, and work that stops.

Computations change models for a moment (heads switched off), so one runs at a time. Each is given a `Stop`, which the
server sets when the client has left or its time is up; it is asked before every layer.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from multihead.explorer import answers, long
from multihead.explorer.compare import Pair, compare, overview
from multihead.explorer.request import Refused, Request, key, parse
from multihead.explorer.subject import Subject
from multihead.explorer.wire import Answer

KEPT_BYTES = 64 * 2**20  # of answers
SECONDS = 30.0  # for one computation


class Stopped(Exception):
    """Nobody waits for this any more."""


class Stop:
    """Asked again and again by a computation, and raises once there is no reason to go on."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._left, self._seconds, self._end = threading.Event(), seconds, time.monotonic() + seconds

    def set(self) -> None:
        """The client has left."""
        self._left.set()

    def __call__(self, *_: Any) -> None:
        if self._left.is_set():
            raise Stopped
        if time.monotonic() > self._end:
            raise Refused(f"this took more than {self._seconds:.0f} s: expected a shorter input", "slow", 504)


class Session:
    """Answers requests about its subjects.

    >>> from multihead.explorer.packaged import Example
    >>> session = Session([Example()])
    >>> answer = session.answer(
    ...     "trace", {"model": "example", "layer": 0, "input": {"kind": "text", "text": "I love pepperoni pizza"}}
    ... )
    >>> answer.tensors["weights"].shape
    torch.Size([8, 4, 4])
    """

    def __init__(self, subjects: Sequence[Subject]) -> None:
        if not subjects:
            raise ValueError("subjects is empty: expected at least one model or layer")
        self.subjects = {subject.id: subject for subject in subjects}
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock_of_kept = threading.Lock()
        self._kept_bytes = 0
        self.lenses = long.Lenses()
        self.pair: Pair | None = None  # two side by side
        self.start_with(None)

    def start_with(self, given: Mapping[str, Any] | None, model: str | None = None, layer: int | None = None) -> None:
        """Let the page open with this input of this layer; the first example of the first subject unless given."""
        subject = self.subject(Request(model=next(iter(self.subjects)) if model is None else model))
        if layer is None:
            layer = len(subject.layers()) - 1 if subject.kind == "picture" else 0
        shown = subject.examples()[0]["input"] if given is None else dict(given)
        self.first: dict[str, Any] = {"model": subject.id, "layer": layer, "input": shown}

    def prepare(self) -> None:
        """Compute what the page asks for first, so that it is there when the page opens."""
        for route, request in self.opening(self.first):
            self.respond(route, request)

    def opening(self, first: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The requests a page opens with."""
        model, item = {"model": first["model"]}, {"input": first["input"]}
        layer, subject = {"layer": first["layer"]}, self.subjects[first["model"]]
        if first["input"]["kind"] == "given" and (subject.given or 0) > subject.most:
            return [("models", {}), ("thumbnails", model | layer | item)]
        asked: list[tuple[str, dict[str, Any]]] = [("models", {}), ("trace", model | layer | item)]
        if first["input"]["kind"] == "text":
            asked.append(("tokens", model | {"text": first["input"]["text"]}))
        if subject.gives_weights:
            asked.append(("weights", model | layer))
        asked.append(("heads", model | item))
        if subject.predicts is not None:
            asked.append(("predict", model | item))
        return asked

    def answer(self, route: str, given: Any, stop: Stop | None = None) -> Answer:
        """The answer to one request; a request that cannot be answered raises `Refused`, in words."""
        return Answer.from_bytes(self.respond(route, given, stop))

    def kept(self, route: str, given: Any) -> bytes | None:
        """The answer, where it was computed before."""
        if not isinstance(given, dict):
            return None
        with self._lock_of_kept:
            name = key(route, given)
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)

    def respond(self, route: str, given: Any, stop: Stop | None = None) -> bytes:
        """The answer to one request, as it travels."""
        request = parse(route, given)
        found = self.kept(route, given)
        if found is not None:
            return found
        if route == "models":
            models = [subject.describe() for subject in self.subjects.values()]
            return Answer({"first": self.first, "models": models, "pair": self.said_of_pair()}).to_bytes()
        subject = self.subject(request)
        stop = stop or Stop()
        with self.working(subject, stop):
            if route in ("compare", "overview"):
                if self.pair is None:
                    raise Refused("nothing is compared here: expected explore(a, b, x=…)", "missing", 404)
                both = compare(self.pair, request) if route == "compare" else overview(self.pair, request, stop)
                return both.to_bytes()
            if route in long.ROUTES:
                data = long.ROUTES[route](self.lenses, subject, request).to_bytes()
            else:
                data = answers.ROUTES[route](subject, request).to_bytes()
        if subject.fixed:
            self._keep(key(route, given), data)
        return data

    def picture(self, model: str, data: bytes, stop: Stop | None = None) -> bytes:
        """What a model sees of a picture file."""
        subject = self.subject(Request(model=model))
        with self.working(subject, stop or Stop()):
            return answers.picture(subject, data).to_bytes()

    def subject(self, request: Request) -> Subject:
        if request.model not in self.subjects:
            there = ", ".join(self.subjects)
            raise Refused(f"model={request.model[:60]!r}: expected one of {there}", "missing", 404)
        return self.subjects[request.model]

    def said_of_pair(self) -> dict[str, str] | None:
        """The names of what is compared."""
        return None if self.pair is None else {"left": self.pair.left, "right": self.pair.right}

    @contextmanager
    def working(self, subject: Subject, stop: Stop) -> Iterator[None]:
        """Inside the block, this computation is the only one, and stops when it should."""
        while not self._lock.acquire(timeout=0.1):
            stop()
        hooks = []
        try:
            stop()
            hooks = [part.register_forward_pre_hook(stop) for part in subject.parts()]
            with torch.inference_mode():
                yield
        except Refused:
            raise
        except (ValueError, TypeError, IndexError) as error:  # the package's own refusals are sentences
            raise Refused(str(error)) from error
        finally:
            for hook in hooks:
                hook.remove()
            self._lock.release()

    def _keep(self, name: str, data: bytes) -> None:
        with self._lock_of_kept:
            self._kept_bytes += len(data) - len(self._kept.pop(name, b""))
            self._kept[name] = data
            while self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
