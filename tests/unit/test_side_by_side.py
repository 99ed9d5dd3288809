"""Two traces side by side: what is compared, and what cannot be."""

from __future__ import annotations

import exports as x
import pytest

import nsan
from nsan.report import shown
from nsan.report import side_by_side as module
from nsan.report.blocks import Picture, Points, Table, Text
from nsan.report.shown import Blocks
from nsan.report.side_by_side import (
    about_views,
    range_of_both,
    side_by_side,
    steps_of_two,
    traffic_of_two,
)
from nsan.report.tables import table_of
from nsan.units import format_count

HOTSPOT = x.REPOSITORY / "sample_data" / "nvprof_hotspot_v100_1024.log.gz"
WITHOUT_FAULTS = x.REPOSITORY / "sample_data" / "um_vector_add_rtx4060l.sqlite"


def export(*copies, faults=(), ranges=(), **about):
    made = x.Export(**about).add(x.MEMCPY, *copies)
    if faults:
        made.add(x.GPU_FAULTS, *faults)
    if ranges:
        made.add(x.NVTX, *ranges)
    return made


def row_of(blocks, label):
    (table,) = (each for each in blocks if isinstance(each, Table))
    return next((row[1:] for row in table.rows if row[0] == label), None)


def notes_of(blocks):
    return " ".join(note for each in blocks if isinstance(each, Table) for note in each.notes)


def texts_of(blocks):
    return [each.text for each in blocks if isinstance(each, Text)]


# Figures --------------------------------------------------------------------------------------------


def test_a_figure_has_both_values_the_difference_and_the_ratio(trace_of):
    a = trace_of(export(x.migration(0, 100, x.MIB), faults=[x.gpu_fault(0, 5)]))
    b = trace_of(
        export(
            x.migration(0, 50, 2 * x.MIB),
            x.migration(80, 90, x.MIB, kind=x.DTOH, cause=x.EVICTION),
            faults=[x.gpu_fault(0, 5), x.gpu_fault(5, 9), x.gpu_fault(9, 12)],
        )
    )
    both = side_by_side(a, b)
    assert row_of(both, "Moved into GPUs") == ("1.00 MiB", "2.00 MiB", "+1.00 MiB", "2")
    assert row_of(both, "Moved out of GPUs") == ("0 B", "1.00 MiB", "+1.00 MiB", "-")
    assert row_of(both, "Moved by eviction") == ("0 B", "1.00 MiB", "+1.00 MiB", "-")
    assert row_of(both, "GPU fault rows") == ("1", "3", "+2", "3")
    assert row_of(both, "Time with a copy running") == ("100 ns", "60 ns", "-40 ns", "0.6")
    assert row_of(side_by_side(b, a), "GPU fault rows") == ("3", "1", "-2", "0.333")
    assert "derived: Duration" in notes_of(both)
    assert "Moved between GPUs" in notes_of(both)
    assert row_of(both, "Moved between GPUs") is None


def test_what_one_did_not_record_has_no_difference(trace_of):
    a = trace_of(export(x.migration(0, 100, x.MIB), faults=[x.gpu_fault(0, 5)]))
    both = side_by_side(a, nsan.open_trace(WITHOUT_FAULTS))
    for label in ("GPU fault rows", "VA blocks with fault rows"):
        assert row_of(both, label) == ("1", "not recorded", "-", "-")


def test_of_a_trace_without_causes_no_cause_is_0(trace_of):
    a = nsan.open_trace(HOTSPOT)
    b = trace_of(export(x.migration(0, 100, x.MIB)))
    both = side_by_side(a, b)
    assert row_of(both, "Moved by page fault") == ("unknown", "1.00 MiB", "-", "-")
    assert row_of(both, "Moved for a cause that is not known")[1] == "0 B"
    assert row_of(both, "Duration, first to last event")[0] == "unknown"
    assert any(text.startswith("They differ in their GPUs: Tesla V100") for text in texts_of(both))


def test_which_is_which_and_of_which_kind_is_said(trace_of):
    modelled = x.REPOSITORY / "sample_data" / "model" / "stream" / "stream.sqlite"
    a, b = nsan.open_trace(modelled), trace_of(export(x.migration(0, 100, x.MIB)))
    first = side_by_side(a, b)[0]
    assert isinstance(first, Points)
    assert [(p.label, p.kind) for p in first.points] == [("A", "modelled"), ("B", "recorded")]
    assert first.points[0].text.startswith("`stream.sqlite`")
    assert "Those of A are the model's" in notes_of(side_by_side(a, b))
    assert "Those of B are the model's" in notes_of(side_by_side(b, a))
    assert notes_of(side_by_side(a, a)).endswith("not recorded.")
    assert "derived" not in notes_of(side_by_side(a, a))


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


def test_step_n_stands_beside_step_n_and_one_too_many_stands_alone(trace_of):
    a, b = trace_of(stepped(x.MIB, x.MIB)), trace_of(stepped(x.MIB, 3 * x.MIB, x.MIB))
    (table,) = steps_of_two(a, b, nvtx="step")
    place = table.heads.index("In, A")
    assert [row[place : place + 3] for row in table.rows] == [
        ("1.00 MiB", "1.00 MiB", "1"),
        ("1.00 MiB", "3.00 MiB", "3"),
        ("-", "1.00 MiB", "-"),
    ]
    place = table.heads.index("Fault rows, A")
    assert [row[place] for row in table.rows] == ["1", "0", "-"]
    assert "A has 2 steps (NVTX range `step`); B has 3 steps" in table.notes[0]


def test_a_trace_without_steps_is_named(trace_of):
    a, b = trace_of(stepped(x.MIB, x.MIB)), trace_of(export(x.migration(0, 9, 4096)))
    (said,) = steps_of_two(a, b)
    assert said.tone == "missing"
    assert said.text.startswith("B has no steps")


def repeated(*sizes):
    """Steps that no range marks: the same two kernels, again and again."""
    made = stepped(*sizes)
    del made.rows[x.NVTX]
    made.strings |= {11: "forward", 12: "backward"}
    starts = (1_000 * i for i in range(len(sizes)))
    pairs = ((at, at + 400) for at in starts)
    kernels = [
        x.kernel(at, at + 300, name=n)
        for pair in pairs
        for at, n in zip(pair, (11, 12), strict=True)
    ]
    return made.add(x.KERNEL, *kernels)


def test_where_one_has_not_the_range_its_steps_are_looked_for(trace_of):
    sizes = [x.MIB] * 6
    a, b = trace_of(stepped(*sizes)), trace_of(repeated(*sizes))
    said, table = steps_of_two(a, b, nvtx="step")
    assert said == Text("B has no NVTX range. Steps were looked for there.", "note")
    assert len(table.rows) == 6
    assert "A has 6 steps (NVTX range `step`); B has 6 steps (repeats of the kernels" in str(
        table.notes
    )


def test_steps_that_another_range_marks_are_found(trace_of):
    ranges = [x.nvtx(1_000 * i, 1_000 * i + 900, "train") for i in range(3)]
    copies = [x.migration(1_000 * i + 10, 1_000 * i + 20, x.MIB) for i in range(3)]
    a, b = trace_of(stepped(*[x.MIB] * 3)), trace_of(export(*copies, ranges=ranges))
    said, table = steps_of_two(a, b, nvtx="step")
    assert said.text == "B has no NVTX range `step`, but `train`. Steps were looked for there."
    assert "B has 3 steps (NVTX range `train`)" in table.notes[0]
    assert len(table.rows) == 3


def test_which_ranges_it_has_instead_is_said(trace_of):
    other = export(x.migration(0, 9, 4096), ranges=[x.nvtx(0, 9, "a`b"), x.nvtx(0, 5, "train")])
    a, b = trace_of(stepped(x.MIB, x.MIB)), trace_of(other)
    assert texts_of(steps_of_two(a, b, nvtx="step"))[0] == (
        "B has no NVTX range `step`, but `a'b`, `train`. Steps were looked for there."
    )
    assert texts_of(steps_of_two(a, b)) == texts_of(steps_of_two(a, b, nvtx="step"))[1:]


def test_more_steps_than_are_shown_are_counted_as_every_number_is(trace_of):
    many = trace_of(stepped(*[4096] * 1_030))
    (table,) = steps_of_two(many, many, nvtx="step")
    assert len(table.rows) == 24
    assert table.notes[0] == f"{format_count(1_006)} more steps."
    assert table.notes[0] != "1006 more steps."


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
