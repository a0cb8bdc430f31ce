"""Look at every page of the built site in Chromium: `make docs-look`.

Each is opened wide and narrow, in light and in dark. It must have no violation of WCAG A and AA
that axe-core sees, no error in the console, and nothing that makes it scroll sideways. What was
seen is saved as pictures.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

Scheme = Literal["light", "dark"]

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], "preload": False}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# In pixels, and the schemes in their order: axe-core checks the first, so that it sees both layouts
# and both schemes.
WIDTHS: dict[int, tuple[Scheme, Scheme]] = {1280: ("light", "dark"), 400: ("dark", "light")}
# Of the entries in a section of the API the first two stand for all, which are written alike:
# axe-core is slow on many.
LOOKED_AT = {"include": [["html"]], "exclude": [["dl.py:nth-of-type(n+3)"]]}
TALLEST = 8000  # of a picture, in pixels

# What reaches over the right edge, without what lies in a box that scrolls by itself.
TOO_WIDE = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const clipped = (node) => node && node !== document.body &&
    (getComputedStyle(node).overflowX !== 'visible' || clipped(node.parentElement));
  return [...document.body.querySelectorAll('*')]
    .filter((node) => node.getBoundingClientRect().right > width + 1)
    .filter((node) => !clipped(node.parentElement))
    .slice(0, 5).map((node) => node.outerHTML.slice(0, 120));
}"""


def browser() -> str | None:
    """Return the Chromium of this machine."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def look(page: Page, picture: Path) -> Iterator[str]:
    """Yield what is too wide on an open page, and save a picture of it."""
    sizes = {
        "width": page.evaluate("innerWidth"),
        "height": page.evaluate("document.documentElement.scrollHeight"),
    }
    page.screenshot(
        path=picture,
        full_page=True,
        clip={"x": 0, "y": 0, **sizes, "height": min(sizes["height"], TALLEST)},
    )
    yield from (f"too wide: {element}" for element in page.evaluate(TOO_WIDE))


def check(page: Page) -> Iterator[str]:
    """Yield what axe-core finds, the first elements of each rule that they violate."""
    for violation in Axe().run(page, context=LOOKED_AT, options=RULES).response["violations"]:
        for node in violation["nodes"][:3]:
            yield (
                f"{violation['id']}: {node['failureSummary'].splitlines()[1].strip()}:"
                f" {node['html'][:120]}"
            )


def walk(address: str, names: Sequence[str], pictures: Path, width: int) -> list[str]:
    """Return the faults of the named pages at this width; check the layout in the first scheme."""
    found, errors = [], []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": width, "height": 900})
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name in names:
            picture = f"{name.removesuffix('.html').replace('/', '-')}-{width}-{{}}.png"
            first, second = WIDTHS[width]
            page.emulate_media(color_scheme=first)
            page.goto(f"{address}/{name}")
            wrong = [*look(page, pictures / picture.format(first)), *check(page)]
            page.emulate_media(color_scheme=second)
            wrong += [*look(page, pictures / picture.format(second)), *errors]
            found += [f"{name}, {width} px: {what}" for what in dict.fromkeys(wrong)]
            errors.clear()
        chromium.close()
    return found


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site on this machine inside a `with` block.

    Its search and its checks do not run from files.
    """

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main() -> int:
    """Look, print what is wrong, and return the exit status."""
    parser = argparse.ArgumentParser(description="Look at every page of the site in Chromium.")
    parser.add_argument("pages", nargs="*", help="names such as start.html (default: all)")
    parser.add_argument("--site", type=Path, default=Path("build/site"))
    parser.add_argument("--pictures", type=Path, default=Path("build/looks"))
    options = parser.parse_args()
    site = options.site.resolve()
    names = options.pages or sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    names = [
        name
        for name in names
        # Sources are written out by Sphinx, all in one way.
        if not name.startswith(("_downloads", "_modules")) and Path(name).parent.name != "_static"
    ]
    if not names:
        parser.error(f"no page in {site}: run `make docs` first")
    options.pictures.mkdir(parents=True, exist_ok=True)
    with served(site) as address, ProcessPoolExecutor(len(WIDTHS), get_context("spawn")) as pool:
        seen = [pool.submit(walk, address, names, options.pictures, width) for width in WIDTHS]
        wrong = [what for one in seen for what in one.result()]
    print(
        "\n".join(wrong)
        or f"{len(names)} pages, wide and narrow, light and dark: pictures in {options.pictures}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
