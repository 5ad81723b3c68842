"""Write the pictures of README and docs: the explorer in a headless Chromium. `make screenshots`, or

python examples/screenshots.py docs/pictures
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from multihead.explorer import serve
from multihead.explorer.session import Session
from multihead.explorer.subjects import of_package

FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-sync"
REPEATS = "the+whale+saw+the+ship+and+the+whale+saw+the"
# name, width, height, theme, state, what to show (a selector, or the top of the page)
PICTURES = [
    ("explorer", 1440, 1180, "light", "model=lm&step=3&head=1&layer=1&at=weights.1.11.10", None),
    ("explorer-phone", 390, 844, "light", "model=lm&step=2", None),
    ("mask", 1280, 900, "light", "model=lm&step=3&mask=none", ".cheat"),
    ("heads", 1280, 900, "light", f"model=lm&text={REPEATS}&sort=induction&layer=1&off=1.0&pins=0.0,1.0", ".heads"),
    ("learn", 1280, 740, "light", "lesson=width", None),
    ("picture", 1280, 900, "light", "model=vit&sample=ankle+boot&layer=1&head=1&at=query.18", ".input"),
]


def main(folder: Path) -> None:
    names = ("chromium", "chromium-browser", "chromium-headless-shell")
    browser_path = next(filter(None, map(shutil.which, names)), None)
    if browser_path is None:
        sys.exit("no chromium: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(of_package())
    session.prepare()
    with serve.start(session, port=0, browser=False) as running, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=browser_path, args=FLAGS.split())
        for name, width, height, theme, state, selector in PICTURES:
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
            )
            page = context.new_page()
            page.goto(f"{running.url}#{state}")
            page.wait_for_selector(".strip button[aria-current]", state="attached")
            page.wait_for_load_state("networkidle")
            page.wait_for_timeout(500)
            path = folder / f"{name}.png"
            if selector is None:
                page.screenshot(path=path)
            else:
                page.evaluate(
                    "document.querySelector('.strip').style.position = 'static'"
                )  # it would lie over the rest
                page.locator(selector).screenshot(path=path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
            context.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures"))
