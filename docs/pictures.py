"""Make the pictures of the README again: `make pictures`. Needs Chromium.

They are views of what `explorer.to_html` writes, so they show what a user sees, from a sample that everybody has.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import nsan

HERE = Path(__file__).parent
SAMPLE = HERE.parent / "sample_data/model/pca_on/pca_on.sqlite"
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")


def main() -> None:
    """Draw the overview in light, and a cluster with its facts in dark."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        copy = nsan.explore(nsan.open_trace(SAMPLE)).to_html(Path(folder) / "explorer.html")
        browser = playwright.chromium.launch(
            executable_path=os.environ.get("NSAN_CHROMIUM", "/usr/bin/chromium"),
            args=list(ARGUMENTS),
        )
        for name, theme, prepare in (
            ("explorer", "light", _nothing),
            ("explorer-cluster", "dark", _pick_a_cluster),
        ):
            page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=theme)
            page.goto(copy.as_uri())
            page.wait_for_selector(".nsan-explorer[data-views]:not([data-views='0'])")
            prepare(page)
            page.locator(".nsan-explorer").screenshot(path=HERE / f"{name}.png")
        browser.close()


def _nothing(page: Page) -> None:
    page.wait_for_selector("[data-nsan='clusters'] tr[data-id]")


def _pick_a_cluster(page: Page) -> None:
    whole = page.locator(".nsan-explorer").get_attribute("data-window")
    page.locator("[data-nsan='clusters'] tr[data-id]").nth(1).click()
    page.wait_for_selector(f".nsan-explorer:not([data-window='{whole}'])")
    page.mouse.move(0, 0)


if __name__ == "__main__":
    main()
