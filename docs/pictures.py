"""Make the pictures of the README and the guides again: `make pictures`. Needs Chromium.

They are views of what `explorer.to_html` and `nsan report` write, so they show what a user sees, from a sample
that everybody has.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page, sync_playwright

import nsan
from nsan.cli import main as run_nsan

HERE: Final = Path(__file__).parent
SAMPLE: Final = HERE.parent / "sample_data/model/pca_on/pca_on.sqlite"
ARGUMENTS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
)


def main() -> None:
    """Draw the explorer in light, a cluster with its facts in dark, and the verdict of the report."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("NSAN_CHROMIUM", "/usr/bin/chromium"),
            args=list(ARGUMENTS),
        )
        copy = nsan.explore(nsan.open_trace(SAMPLE)).to_html(Path(folder) / "explorer.html")
        _explorer(browser, copy, "explorer", "light", _nothing)
        _explorer(browser, copy, "explorer-cluster", "dark", _pick_a_cluster)
        _report(browser, Path(folder) / "report.html")
        browser.close()


def _explorer(
    browser: Browser, copy: Path, name: str, theme: str, prepare: Callable[[Page], None]
) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=theme)
    page.goto(copy.as_uri())
    page.wait_for_selector(".nsan-explorer[data-views]:not([data-views='0'])")
    prepare(page)
    page.locator(".nsan-explorer").screenshot(path=HERE / f"{name}.png")


def _nothing(page: Page) -> None:
    page.wait_for_selector("[data-nsan='clusters'] tr[data-id]")


def _pick_a_cluster(page: Page) -> None:
    whole = page.locator(".nsan-explorer").get_attribute("data-window")
    page.locator("[data-nsan='clusters'] tr[data-id]").nth(1).click()
    page.wait_for_selector(f".nsan-explorer:not([data-window='{whole}'])")
    page.mouse.move(0, 0)


def _report(browser: Browser, place: Path) -> None:
    """Show the report from its verdict on."""
    if run_nsan(["report", str(SAMPLE), "-q", "-o", str(place)]):
        raise SystemExit(1)
    page = browser.new_page(viewport={"width": 1200, "height": 1060})
    page.goto(place.as_uri())
    page.wait_for_selector("html[data-charts='drawn']")
    page.get_by_role("heading", name="The verdict").evaluate("it => it.scrollIntoView()")
    page.wait_for_selector("nav a[aria-current='true']:has-text('verdict')")
    page.screenshot(path=HERE / "report.png")


if __name__ == "__main__":
    main()
