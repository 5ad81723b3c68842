"""What both public suites need: their alignment of queries and keys in our masks, and the ledger."""

import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

import multihead as mh
from multihead.attention import BACKENDS as ALL

BACKENDS = [name for name in ALL if name != "flex"]  # that one is for other devices: tests/test_flex.py


def standing(Q: int, K: int, reach: int | Tensor, left: int | None, right: int | None) -> mh.Mask:
    """Query q stands at key p = q + reach − Q and sees keys p − left … p + right; None leaves a side open.

    `reach` is one past the key of the last query. Ours is K, the suites' own need not be: `reach=Q` is their top-left.
    A tensor gives each row of the batch its own, and hides the keys from there on.

    Where the last query stands before the last key and sees nothing after its own, the keys after it are a document
    that no query belongs to: one interval per query, and nothing dense.

    >>> print(standing(3, 5, 3, None, 0).draw(3, 5))
    ■ · · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    >>> print(standing(2, 4, torch.tensor([1, 3]), None, 0).draw(2, 4, batch=1))
    ■ ■ · ·
    ■ ■ ■ ·

    Elsewhere a wider window on one side and a narrower one on the other does the same.

    >>> print(standing(5, 3, 5, None, 0).draw(5, 3))
    ■ · ·
    ■ ■ ·
    ■ ■ ■
    ■ ■ ■
    ■ ■ ■
    >>> print(standing(3, 4, 3, 1, 2).draw(3, 4))
    ■ ■ ■ ·
    ■ ■ ■ ■
    · ■ ■ ■
    """
    if isinstance(reach, Tensor):
        keys = torch.stack([reach, K - reach], dim=-1)  # (B, 2)
        return mh.Documents(torch.tensor([Q, 0]).expand_as(keys), keys) & mh.Window(left, right)
    if right == 0 and reach < K:
        return mh.Documents([Q, 0], [reach, K - reach]) & mh.Window(left, right)
    shift = reach - K
    return mh.Window(None if left is None else left - shift, None if right is None else right + shift)


class Ledger:
    """One suite's part of ledger.toml: which cases are left out, coarse, or refused by a backend, and why."""

    def __init__(self, suite: str) -> None:
        entries = tomllib.loads(Path(__file__).with_name("ledger.toml").read_text(encoding="utf-8"))[suite]
        self.left_out: dict[str, str] = {p: e["why"] for e in entries["left_out"] for p in e["cases"]}  # by pattern
        self.coarse: dict[str, str] = {c: e["why"] for e in entries.get("coarse", []) for c in e["cases"]}
        self.refused: dict[tuple[str, str], str] = {
            (case, entry["backend"]): entry["why"] for entry in entries["refused"] for case in entry["cases"]
        }

    def leaves_out(self, case: str) -> bool:
        return any(fnmatchcase(case, pattern) for pattern in self.left_out)

    def pairs(self, cases: Iterable[str]) -> list[tuple[str, str]]:
        """Each case on each backend, but for what is left out or refused."""
        every = [(case, backend) for case in cases if not self.leaves_out(case) for backend in BACKENDS]
        return [pair for pair in every if pair not in self.refused]

    def stale(self, cases: Iterable[str]) -> list[str]:
        """Patterns that leave out none of `cases`, and refusals of cases that are not there."""
        cases = set(cases)
        unused = [pattern for pattern in self.left_out if not any(fnmatchcase(case, pattern) for case in cases)]
        return unused + [case for case, _ in self.refused if case not in cases]


def refusals(call: dict) -> dict[str, str]:
    """Which backends refuse `mh.attend(**call)`, each with its words."""
    reasons = mh.explain(**call).reasons
    return {
        name: why.removeprefix("refuses: ")
        for name, why in reasons.items()
        if name in BACKENDS and why.startswith("refuses: ")
    }
