"""How quickly the explorer's page answers, in a headless Chromium: `python benchmarks/explorer.py`.

The first picture: from the request for the page to the drawn strip. Answers: from an event to the end of the frame that
shows it, the median of several, at N=128 items, 8 heads of 128. Frames: while step 3 of the embedded sentence moves.
"""

import shutil
import statistics
import sys
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
ANSWERS = """async ([key, values]) => {
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  const times = [];
  for (const value of values) {
    await frame(); await new Promise(done => setTimeout(done, 150));
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


def first_picture(browser: Any, url: str) -> float:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(url, wait_until="commit")
    took = page.evaluate(FIRST)
    page.close()
    return took


def main() -> None:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        sys.exit("no chromium: apt-get install chromium")
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(1024, heads=8), torch.randn(128, 1024)
    session = Session(of_package())
    session.prepare()
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=FLAGS.split())
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
        browser.close()


if __name__ == "__main__":
    main()
