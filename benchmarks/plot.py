"""A picture of a run: `python benchmarks/plot.py run.json picture.svg`. Needs matplotlib.

One dot for each case and peer, on a logarithmic scale: to the right of 1 ours is faster, and a grey bar is the A/A
noise of the case, within which a difference means nothing.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from multihead.files import replacing

KINDS = ("attend", "decode", "layer", "model")  # a lens has a yardstick, not a rival


def rows(run):
    """(case, peer, ratio, low, high, noise) of every comparison that was made."""
    for result in run["results"]:
        if not result["noise"] or not result["name"].startswith(KINDS):
            continue
        noise = max(result["noise"]["high"], 1 / result["noise"]["low"]) - 1
        for peer in result["peers"]:
            if c := peer["comparison"]:
                yield result["name"], peer["name"], c["ratio"], c["low"], c["high"], noise


def draw(run, path):
    found = list(rows(run))[::-1]
    peers = sorted({peer for _, peer, *_ in found})
    colours = dict(zip(peers, pyplot.get_cmap("tab10").colors))
    pyplot.rcParams |= {"font.size": 9, "svg.hashsalt": "multihead", "font.family": "sans-serif"}
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.19 * len(found)), layout="constrained")
    labelled = set()
    for y, (_, peer, ratio, low, high, noise) in enumerate(found):
        axes.barh(y, 1 + noise - 1 / (1 + noise), left=1 / (1 + noise), height=0.8, color="0.9")
        axes.plot([low, high], [y, y], color=colours[peer], linewidth=1)
        axes.plot(ratio, y, "o", color=colours[peer], markersize=4, label=None if peer in labelled else peer)
        axes.text(high * 1.04, y, f"{ratio:.2f}", va="center", fontsize=7, color="0.3")
        labelled.add(peer)
    names = [case for case, *_ in found]
    axes.set_yticks(range(len(found)), [n if names[y + 1 : y + 2] != [n] else "" for y, n in enumerate(names)])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    ticks = (0.5, 1, 2, 4, 8, 16, 32)
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set_xlim(0.4, 60)
    axes.set_ylim(-0.7, len(found) - 0.3)
    axes.spines[["top", "right"]].set_visible(False)
    machine = run["machine"]
    where = f"{machine['CPU']}, {machine['threads']} threads, fp32, {machine['date']}, commit {machine['commit']}"
    axes.set_xlabel(f"the peer's time over ours: right of 1, ours is faster\n{where}")
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    with replacing(path) as beside:
        figure.savefig(beside, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
