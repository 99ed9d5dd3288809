"""Every section of a report of a part: by time, NVTX range, GPU and process; none may fail."""

from __future__ import annotations

import pytest
import reports

from nsan.report.contents import SECTIONS
from nsan.report.report import Report

PARTS = {
    "real, time": ("real", {"time": "266ms/268ms"}),
    "real, nothing in it": ("real", {"time": "100s/101s"}),
    "a log of nvprof, process": ("hotspot_1024", {"pid": 2150}),
    "two GPUs, one of them": ("two_gpus", {"device": 1}),
    "training, range": ("pca_on", {"nvtx": "forward"}),
    "evictions, time and GPU": ("oversubscribed_sweep", {"time": "20ms/40ms", "device": 0}),
    "ping-pong, all filters": ("ping_pong", {"time": "0/10ms", "device": 0, "pid": 4242}),
}


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    """Charts are built and neither checked nor painted, which would take most of the time."""
    monkeypatch.setattr("nsan.report.report.rendered", lambda *_: b"<svg/>")
    monkeypatch.setattr("nsan.report.report.specification", lambda _: {})


@pytest.mark.parametrize("part", PARTS)
def test_every_section_of_a_part_is_written(part):
    sample, filters = PARTS[part]
    report = Report(reports.path_of(sample), filters=filters)
    written = {name: str(report.section(name)) for name in SECTIONS}
    assert report.is_part
    assert all(written.values())
    assert not [name for name, text in written.items() if "needs the whole capture" in text]
