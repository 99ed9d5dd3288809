"""Two traces side by side: one scale for both, and what views are laid to each other by."""

from __future__ import annotations

import exports as x
import pytest

import nsan
from nsan.report import shown
from nsan.report import side_by_side as module
from nsan.report.blocks import Picture, Text
from nsan.report.shown import Blocks
from nsan.report.side_by_side import (
    about_views,
    range_of_both,
    traffic_of_two,
)
from nsan.report.tables import table_of

WITHOUT_FAULTS = x.REPOSITORY / "sample_data" / "um_vector_add_rtx4060l.sqlite"


def export(*copies, faults=(), ranges=(), **about):
    made = x.Export(**about).add(x.MEMCPY, *copies)
    if faults:
        made.add(x.GPU_FAULTS, *faults)
    if ranges:
        made.add(x.NVTX, *ranges)
    return made


def texts_of(blocks):
    return [each.text for each in blocks if isinstance(each, Text)]


# Traffic --------------------------------------------------------------------------------------------


def test_the_chart_of_both_has_the_stretches_of_the_longer_one(trace_of):
    long = export(*(x.migration(at, at + 9, 4096) for at in range(0, 120_000, 1_000)))
    short = export(x.migration(0, 9, 4096), x.migration(900, 909, 4096))
    (picture,) = traffic_of_two(trace_of(long), trace_of(short))
    assert isinstance(picture, Picture)
    assert "in stretches of 1 us" in picture.svg
    assert "modelled" not in picture.svg


def test_without_any_copy_the_chart_says_so(trace_of):
    none = trace_of(x.Export().add(x.KERNEL, x.kernel(0, 10)))
    (said,) = traffic_of_two(none, none)
    assert said == Text("Nothing moved in either, or it was not recorded.", "note")


# Steps ----------------------------------------------------------------------------------------------


def stepped(*sizes):
    ranges = [x.nvtx(1_000 * i, 1_000 * i + 900, "step") for i in range(len(sizes))]
    copies = [x.migration(1_000 * i + 10, 1_000 * i + 20, n) for i, n in enumerate(sizes)]
    return export(*copies, faults=[x.gpu_fault(10, 12)], ranges=ranges)


# Views ----------------------------------------------------------------------------------------------


def test_two_views_begin_with_a_range_only_where_both_have_it(trace_of):
    a, b = trace_of(stepped(x.MIB)), trace_of(export(x.migration(0, 9, 4096)))
    assert range_of_both(a, a, "step") == "step"
    assert range_of_both(a, b, "step") == range_of_both(b, a, "step") == ""
    assert range_of_both(b, b, "step") == range_of_both(a, a, "") == range_of_both(b, b, "") == ""


@pytest.mark.parametrize("looks", [True, False], ids=["live", "in a report"])
def test_the_keys_are_told_only_where_somebody_can_press_them(trace_of, monkeypatch, looks):
    for place in (module, shown):
        monkeypatch.setattr(place, "has_front_end", lambda: looks)
    a, b = trace_of(stepped(x.MIB)), trace_of(export(x.migration(0, 9, 4096)))
    for other, zero in ((a, "time 0 is the first `step` of each."), (b, "as not both have")):
        (said,) = texts_of(about_views(a, other, nvtx="step"))
        assert zero in said
        assert ("Press `?`" in said) == looks
        assert ("pictures of both views, each on its own clock" in said) != looks
    assert (shown.if_live("Press.") == Blocks([Text("Press.")])) == looks
    assert bool(shown.if_live("Press.")) == looks


# A table of any source ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def snapshot():
    folder = x.REPOSITORY / "sample_data" / "snapshots"
    return nsan.open_snapshot(folder / "kivi_llama_state_only.pickle.gz")


def test_a_table_of_a_snapshot_has_the_columns_that_are_asked_for(snapshot):
    (table,) = table_of(snapshot, "allocator_state", columns=["pool", "reserved_bytes"], rows=1)
    assert table.heads == ("Pool", "Reserved")
    assert table.rows[0][0] == "all"
    assert any(note.startswith("Figures are recorded") for note in table.notes)


def test_an_analysis_of_something_else_or_without_a_row_is_a_text(snapshot):
    (said,) = table_of(snapshot, "batches")
    assert said.tone == "warning"
    nothing = table_of(nsan.open_trace(WITHOUT_FAULTS), "batch_latency")
    assert isinstance(nothing, Blocks)
    assert "No row." in nothing[0].text
    assert nothing[-1].tone == "missing"
