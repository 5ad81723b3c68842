"""Long inputs: tiles, links and words of a map of up to 100,000 × 100,000 weights, through the lens.

Nothing of size Q×K is ever made. What is kept is a lens, that is q, k and the log-sum-exp of what was looked at, of the
layer on the screen and perhaps the one before; never weights. A map is a pyramid of tiles: at level z a tile has at
most SIDE × SIDE bins of 2^z queries by 2^z keys each, counted from the first ones, so that four tiles of a level lie
under one of the level above, and at level 0 a bin is a single weight.

One answer computes at most about `BUDGET` scores: a large tile comes some rows at a time, and whoever asks goes on
asking, or not. So nothing takes long enough to need more than that to be stopped, and the page has something to show
soon. Sooner still comes a sample: of each bin the one query in the middle, exact for that query.
"""

import json
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from multihead.explorer.request import Refused, Request, as_mask
from multihead.explorer.subject import Items, Subject, allowed_by
from multihead.explorer.tokens import Token, named
from multihead.explorer.wire import Answer
from multihead.lens import Lens

SIDE = 256  # bins of a tile, down and across
BUDGET = 2**28  # scores of one answer: about half a second on two cores
BLOCK = 256  # queries: where the lens keeps the log-sum-exp, it does so by this many
MOST_NAMES = 4096  # items of one answer
MOST_FOUND = 1000  # places of one answer
MOST_LINKS = 100
THUMBNAIL = 48  # bins
KEPT_LENSES = 2
KEPT_BYTES = 2**30  # of all lenses but the newest


@dataclass
class Seen:
    """A lens on one layer, the names of its queries and keys, and how to find words among them."""

    lens: Lens
    items: Items

    def names(self, axis: int) -> list[Token]:
        """Of the queries (2) or the keys (3)."""
        count = self.lens.shape[axis]
        keys = self.items.extra.get("key_tokens") if axis == 3 else None
        known = self.items.tokens if keys is None else keys
        return known if len(known) == count else named([str(n) for n in range(count)])


@dataclass
class Words:
    """An input's items as one run of bytes in which words can be found."""

    items: Items

    @cached_property
    def parts(self) -> list[bytes]:
        found = [bytes.fromhex(t["bytes"]) or str(t["text"]).encode() for t in self.items.tokens]
        between = b"" if any(t["bytes"] for t in self.items.tokens) else b" "  # names are words of their own
        return [part.lower() + between for part in found]

    @cached_property
    def starts(self) -> list[int]:
        return [0, *accumulate(map(len, self.parts))]

    @cached_property
    def whole(self) -> bytes:
        return b"".join(self.parts)

    def find(self, text: str) -> list[int]:
        """The item in which each occurrence begins; capital letters of English count as small ones."""
        needle, at, places = text.encode("utf-8", "replace").lower(), 0, []
        while needle and (at := self.whole.find(needle, at)) >= 0:
            places.append(bisect_right(self.starts, at) - 1)
            at += len(needle)
        return places


class Lenses:
    """The lenses and inputs that were looked at last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, Seen] = OrderedDict()
        self._words: OrderedDict[str, Words] = OrderedDict()

    def words(self, subject: Subject, request: Request) -> Words:
        key = _key(subject, request, False)
        if key not in self._words:
            self._words[key] = Words(subject.read_long(request.input))
        return _latest(self._words, key, KEPT_LENSES)

    def seen(self, subject: Subject, request: Request) -> Seen:
        """The lens that a request is about."""
        key = _key(subject, request, True)
        if key not in self._seen:
            subject.layer(request.layer)
            items = self.words(subject, request).items
            mask = allowed_by(subject, request, as_mask(request.mask, items.count))
            with subject.without(request):
                lens = subject.look_at(items, request.layer, mask)
            while self._seen and self.nbytes + lens.nbytes > KEPT_BYTES:
                self._seen.popitem(last=False)
            self._seen[key] = Seen(lens, items)
        return _latest(self._seen, key, KEPT_LENSES)

    @property
    def nbytes(self) -> int:
        """Bytes of all lenses."""
        return sum(seen.lens.nbytes for seen in self._seen.values())


def _key(subject: Subject, request: Request, layer: bool) -> str:
    said: list[Any] = [subject.id, subject.version(), dict(request.input)]
    if layer:
        said += [request.layer, None if request.mask is None else dict(request.mask), request.off, request.with_]
    return json.dumps(said, sort_keys=True)


def _latest(kept: OrderedDict[str, Any], key: str, most: int) -> Any:
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return kept[key]


def items(lenses: Lenses, subject: Subject, request: Request) -> Answer:
    """The names of some items, and how many there are."""
    tokens = lenses.words(subject, request).items.tokens
    start, stop = request.numbers["start"], request.numbers["stop"]
    if stop - start > MOST_NAMES:
        raise Refused(f"start={start} and stop={stop}: expected at most {MOST_NAMES} items at once")
    return Answer({"count": len(tokens), "start": start, "tokens": tokens[start:stop]})


def find(lenses: Lenses, subject: Subject, request: Request) -> Answer:
    """Where a text occurs: the items in which it begins, from `start` on."""
    if not request.text:
        raise Refused("text is empty: expected what to look for")
    places = lenses.words(subject, request).find(request.text)
    later = [place for place in places if place >= request.numbers.get("start", 0)]
    return Answer({"count": len(places), "places": later[:MOST_FOUND]})


def tile(lenses: Lenses, subject: Subject, request: Request) -> Answer:
    """Rows `first` and on of a tile, as many as one answer may compute; all of a sample."""
    lens = lenses.seen(subject, request).lens
    n = request.numbers
    _, H, Q, K = lens.shape
    if n["head"] >= H:
        raise Refused(f"head={n['head']}: expected 0…{H - 1}")
    step = 2 ** min(n["level"], 40)
    top, left = n["row"] * SIDE * step, n["column"] * SIDE * step
    if top >= Q or left >= K:
        raise Refused(f"row={n['row']} and column={n['column']} of level {n['level']}: the map has {Q} × {K} items")
    queries, keys = range(top, min(Q, top + SIDE * step)), range(left, min(K, left + SIDE * step))
    rows, first = -(-len(queries) // step), n.get("first", 0)
    if first >= rows:
        raise Refused(f"first={first}: expected 0…{rows - 1}, a row of the tile")
    if n.get("sample"):
        middle = [min(row * step + step // 2, len(queries) - 1) for row in range(rows)]
        to, found = rows, _across(lens, n["head"], [queries[m] for m in middle], rows, keys, step, request.pool)
    else:
        to = min(rows, first + max(1, BUDGET // (step * (K + len(keys)))))
        found = pooled(lens, n["head"], queries[first * step : to * step], keys, step, request.pool)
    meta = {"rows": rows, "columns": found.shape[1], "first": first, "to": to, "sample": bool(n.get("sample"))}
    seen = bool((found != 0).any())  # most tiles beside a window, or above a causal diagonal, hold nothing
    return Answer(meta, {"tile": found} if seen else {})


def pooled(lens: Lens, head: int, queries: range, keys: range, step: int, pool: str) -> Tensor:
    """The weights in bins of step × step, counted from the first query and key; the last bins may hold less."""
    whole = len(queries) - len(queries) % step
    parts = [
        _across(lens, head, part, -(-len(part) // step), keys, step, pool)
        for part in (queries[:whole], queries[whole:])
        if part
    ]
    return torch.cat(parts)


def _across(lens: Lens, head: int, queries: Any, rows: int, keys: range, step: int, pool: str) -> Tensor:
    whole = len(keys) - len(keys) % step
    parts = [
        lens.map(rows, -(-len(part) // step), queries=queries, keys=part, pool=pool, heads=head)[0, 0]
        for part in (keys[:whole], keys[whole:])
        if part
    ]
    return torch.cat(parts, dim=1)  # (rows, columns)


def links(lenses: Lenses, subject: Subject, request: Request) -> Answer:
    """The keys a query attends to most, or of some queries those that attend most to a key; the largest first."""
    seen, n = lenses.seen(subject, request), request.numbers
    _, H, Q, K = seen.lens.shape
    count, first = min(n["n"], MOST_LINKS), n.get("first", 0)
    if n["head"] >= H or ("query" in n) == ("key" in n) or n.get("query", 0) >= Q or n.get("key", 0) >= K or first >= Q:
        raise Refused(f"links were asked with {dict(n)}: expected a head of {H}, and one of {Q} queries or {K} keys")
    if "query" in n:
        weights, found = (t[0, 0, 0] for t in seen.lens.top(min(count, K), queries=n["query"], heads=n["head"]))
        to, names = Q, seen.names(3)
    else:
        to = min(Q, first + max(BLOCK, BUDGET // K // BLOCK * BLOCK))
        column = seen.lens.map(
            to - first, 1, queries=range(first, to), keys=range(n["key"], n["key"] + 1), heads=n["head"]
        )
        weights, found = column[0, 0, :, 0].sort(descending=True, stable=True)
        weights, found, names = weights[:count], found[:count] + first, seen.names(2)
    rows = [
        {"item": item, "weight": weight, "text": names[item]["text"]}
        for weight, item in zip(weights.tolist(), found.tolist())
        if item >= 0 and weight > 0
    ]
    return Answer({"links": rows, "to": to, "of": Q})


def thumbnails(lenses: Lenses, subject: Subject, request: Request) -> Answer:
    """Every head of the layer, small: of each bin of queries the one in the middle."""
    seen = lenses.seen(subject, request)
    lens, tokens = seen.lens, seen.items.tokens
    _, _, Q, K = lens.shape
    height, width = min(THUMBNAIL, Q), min(THUMBNAIL, K)
    middle = [(2 * row + 1) * Q // (2 * height) for row in range(height)]
    maps = lens.map(height, width, queries=middle, pool="max")[0]
    named = any(token["text"] != str(n) for n, token in enumerate(tokens))  # else there is nothing to look for
    return Answer({"count": Q, "keys": K, "heads": maps.shape[0], "named": named}, {"maps": maps.to(torch.float16)})


ROUTES = {"items": items, "find": find, "tile": tile, "links": links, "thumbnails": thumbnails}
