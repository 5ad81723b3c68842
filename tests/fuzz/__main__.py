"""python -m tests.fuzz: random calls in a child process, so that a crash is a finding and not the end.

--minutes M or --cases N from --seed S; --kind attend|backward|lens|layer; --case C runs one in this process, by which
every finding can be had again.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from tests.fuzz import hunt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one here, and show everything")
    parser.add_argument("--first", type=int, default=0, help="the first case")
    parser.add_argument("--cases", type=int, help="how many, in all")
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--kind", choices=hunt.KINDS, help="calls of this kind only")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spoil", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        hunt.work(given.seed, given.first, given.kind, given.spoil)
        return 0
    if given.case is not None:
        case = hunt.make(given.seed, given.case, given.kind)
        print(case)
        try:
            print(hunt.judge(case, given.seed, given.case))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    found = hunt.hunt(given.seed, given.first, given.cases, None if given.minutes is None else 60 * given.minutes, given.kind,
                      tell=lambda finding: print(finding, flush=True))  # fmt: skip
    print(found.summary)
    return 1 if found.findings or not found.luck_is_rare else 0


if __name__ == "__main__":
    sys.exit(main())
