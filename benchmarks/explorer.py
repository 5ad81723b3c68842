"""How quickly the explorer's page answers, in a headless Chromium: `python benchmarks/explorer.py`.

The first picture: from the request for the page to the drawn strip. Answers, each from rest: from an event to the end
of the frame that shows it, the median of several, at N=128 items, 8 heads of 128; and those to a change of the mask
while step 3 moves. Frames: while step 3 of the embedded sentence moves. Tiles: from the page's question to its numbers,
on a map of 32,768 items, beside what the lens itself takes for them. Memory: of the server and of the page's process,
before and after a map of 100,000 items was panned and zoomed (Linux).
"""

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright

import multihead as mh
from multihead.explorer import serve
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_package

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --disable-background-networking --disable-sync"
READY = ".strip button[aria-current]"
FIRST = """() => new Promise(done => {
  const look = () => document.querySelector('.strip button[aria-current]')
    ? requestAnimationFrame(() => done(performance.now())) : requestAnimationFrame(look);
  look(); })"""
ANSWERS = """async ([key, values, moving]) => {
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  const times = [];
  for (const value of values) {
    await new Promise(done => setTimeout(done, 150));
    while (document.querySelector('#app[aria-busy=true]') || multihead.app.session.scene.get().later) await frame();
    const { player } = multihead.stage;
    if (!moving) player.finish(); // a step that was walked to moves by itself
    else if (!player.playing) document.querySelector('.play').click();
    await frame();
    const start = performance.now();
    if (key === 'hover') multihead.app.hover.set(value); else multihead.app.store.set({[key]: value});
    await frame();
    times.push(performance.now() - start);
  }
  return times; }"""
FRAMES = """async () => {
  document.querySelector('.play').click();
  const times = []; let last = performance.now();
  for (let n = 0; n < 90; n++) {
    const now = await new Promise(done => requestAnimationFrame(done));
    times.push(now - last); last = now;
  }
  return times.slice(5); }"""

TILES = """async places => {
  const { session } = multihead.app;
  const times = [];
  for (const place of places) {
    const start = performance.now();
    await session.python.ask('tile', {...session.long.get().where, head: 1, ...place}, new AbortController().signal);
    times.push(performance.now() - start);
  }
  return times; }"""
LONG, HUGE = 32_768, 100_000
SHOWN = "() => multihead.app.session.long.get() !== null"
EXACT = "() => document.querySelector('.map').dataset.exact === 'true'"


def first_picture(browser: Any, url: str) -> float:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(url, wait_until="commit")
    took = page.evaluate(FIRST)
    page.close()
    return took


def resident(process: int | str = "self") -> float:
    """What a process has in memory, in MB; not known but on Linux."""
    status = Path(f"/proc/{process}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1000 for line in lines if line.startswith("VmRSS")), float("nan"))


def resident_page(browser: Any) -> float:
    """The same of the largest process that draws a page."""
    found = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    return max(resident(process["id"]) for process in found if process["type"] == "renderer")


def long_page(browser: Any, url: str) -> Any:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(url)
    page.wait_for_function(SHOWN, timeout=120_000)
    return page


def tiles(browser: Any) -> None:
    layer, x = mh.MultiHeadAttention(512, heads=8).eval(), torch.randn(LONG, 512)
    with torch.no_grad():
        lens = layer.look(x, mask=mh.Causal())
    with mh.explore(layer, x, mask=mh.Causal(), browser=False, wait=False, port=0) as running:
        page = long_page(browser, running.url)
        page.wait_for_function(EXACT, timeout=120_000)  # nothing else is computed any more
        for level in (0, 3):
            last = LONG // (256 * 2**level)
            places = [{"level": level, "row": last - 1 - n, "column": last // 2 - 1 - n} for n in range(7)]
            arrived = page.evaluate(TILES, places)
            alone = []
            for place in places:
                size = 256 * 2**level
                queries, keys = (range(place[axis] * size, (place[axis] + 1) * size) for axis in ("row", "column"))
                start = time.perf_counter()
                lens.map(256, 256, queries=queries, keys=keys, pool="max", heads=1)
                alone.append(1000 * (time.perf_counter() - start))
            print(
                f"tile, {4**level:4d} a bin  {statistics.median(arrived):6.0f} ms, the lens alone "
                f"{statistics.median(alone):.0f} ms, the medians of {len(places)}"
            )
        page.close()


def memory(browser: Any) -> None:
    layer, x = mh.MultiHeadAttention(128, heads=2).eval(), torch.randn(HUGE, 128)
    before = resident()
    with mh.explore(layer, x, mask=mh.Causal(), browser=False, wait=False, port=0) as running:
        page = long_page(browser, running.url)
        collector = page.context.new_cdp_session(page)
        sizes = []
        for n in range(121):
            where = f"{800 * n},{750 * n},{(0.5, 1, 24)[n % 3]}"
            page.evaluate("m => multihead.app.store.set({ map: m })", where)
            page.wait_for_function("m => multihead.app.store.get().map === m", arg=where)
            page.wait_for_function(EXACT, timeout=60_000)
            if n % 40 == 0:
                collector.send("HeapProfiler.collectGarbage")
                sizes.append(f"{resident_page(browser):.0f}")
        print(f"server            {resident() - before:6.0f} MB more for {HUGE:,} items, 2 heads of 64")
        print(f"page              {', '.join(sizes)} MB after 1, 41, 81 and 121 places of that map")
        page.close()


def main() -> None:
    names = ("chromium", "chromium-browser", "chromium-headless-shell")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        sys.exit("no chromium: apt-get install chromium")
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(1024, heads=8), torch.randn(128, 1024)
    session = Session(of_package())
    session.prepare()
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=FLAGS.split())
        memory(browser)  # first: nothing else has taken memory yet
        with serve.start(session, port=0, browser=False) as running:
            opened = [first_picture(browser, running.url) for _ in range(5)]
            print(f"first picture     {statistics.median(opened):6.0f} ms, the median of {len(opened)}")
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{running.url}#model=lm&step=3")
            page.wait_for_selector(READY)
            page.wait_for_load_state("networkidle")
            between = page.evaluate(FRAMES)
            print(f"frames            {1000 / statistics.median(between):6.0f} a second while step 3 moves")
            page.close()
        with mh.explore(layer, x, mask=mh.Causal(), browser=False, wait=False, port=0) as running:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{running.url}#step=3")
            page.wait_for_selector(READY)
            page.wait_for_load_state("networkidle")
            asked = {
                "hover": [{"name": "weights", "index": [0, q, q // 2]} for q in range(20, 120, 13)],
                "head": [1, 2, 3, 4, 5, 6, 7],
                "step": [1, 2, 4, 5, 6, 7, 3],
                "mask": ["none", "window:3,3", "prefix:9", "causal:5", "padding:90"],
            }
            first = page.evaluate(ANSWERS, ["step", [7, 3]])[0]  # nothing of step 7 was drawn before
            print(f"step 7, first     {first:6.0f} ms")
            for name, values in asked.items():
                times = page.evaluate(ANSWERS, [name, values])
                print(f"{name:17s} {statistics.median(times):6.0f} ms, the median of {len(times)}")
            times = page.evaluate(ANSWERS, ["mask", asked["mask"], True])
            print(f"mask, in motion   {statistics.median(times):6.0f} ms, the median of {len(times)}")
            page.close()
        tiles(browser)
        browser.close()


if __name__ == "__main__":
    main()
