"""A real Chromium for tests, cut off from the network.

Playwright keeps an event loop in the thread of the tests while it runs, in which no other test could
start one of its own. So the browser belongs to a module, not to the session: it is gone before the
tests of another module begin.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CHROMIUM = os.environ.get("NSAN_CHROMIUM") or "/usr/bin/chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
VIEWPORT = {"width": 1280, "height": 900}
OUTSIDE = re.compile(
    r"^(?!(?:https?|wss?)://(?:localhost|127\.0\.0\.1)(?:[:/]|$)|file:|data:|blob:|about:)"
)
"""Every address that is not on this machine."""


@dataclass
class Watched:
    """What a page did that a reader of the page cannot see."""

    outside: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def _missing():
    """Say why no browser can be started, or nothing."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install playwright"
    if shutil.which(CHROMIUM) is None:
        return f"no {CHROMIUM}: apt install chromium, or set NSAN_CHROMIUM"
    return None


def pytest_collection_modifyitems(items):
    """Whatever asks for the browser carries its mark."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Start Chromium; where it is promised (CI), its absence is a failure."""
    missing = _missing()
    if missing and os.environ.get("NSAN_REQUIRE_BROWSER") == "1":
        pytest.fail(f"NSAN_REQUIRE_BROWSER=1, but {missing}", pytrace=False)
    if missing:
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    home = tmp_path_factory.mktemp("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=list(ARGUMENTS),
            env={**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home)},
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def watched_page(browser):
    """Open pages that cannot reach anything outside, each with what it was seen to do."""
    contexts = []

    def opened(**options):
        context = browser.new_context(**{"viewport": VIEWPORT, **options})
        contexts.append(context)
        seen = Watched()
        context.route(OUTSIDE, lambda route: route.abort())
        context.route_web_socket(OUTSIDE, lambda socket: socket.close())
        context.on("request", lambda request: _note_outside(seen, request.url))
        page = context.new_page()
        page.on("websocket", lambda socket: _note_outside(seen, socket.url))
        page.on("dialog", lambda dialog: _dismiss(seen, dialog))
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        page.on("console", lambda message: _note_error(seen, message))
        page.watched = seen
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def page(watched_page):
    """Open an empty page; ``page.watched`` has what it did."""
    opened = watched_page()
    yield opened
    opened.context.close()


def _note_outside(seen, url):
    if OUTSIDE.match(url):
        seen.outside.append(url)


def _dismiss(seen, dialog):
    seen.dialogs.append(dialog.message)
    dialog.dismiss()


def _note_error(seen, message):
    if message.type == "error":
        seen.errors.append(message.text)


def here(path: Path) -> str:
    """Write the address of a file for a browser."""
    return path.resolve().as_uri()
