"""The section of a report that says what would help."""

from __future__ import annotations

from dataclasses import replace

import pytest
import reports

from nsan.advising import NOTHING, Advised
from nsan.analysis.advisor.advice import Advice, Gain, Number, Silent
from nsan.report.blocks import Code, Heading, Table
from nsan.report.report import Report

ADVICE = Advice(
    "prefetch_before_use",
    "Prefetch `x`",
    "It waited.",
    (
        Number("moved", 4096, "byte", "recorded"),
        Number("waited", 1000, "ns", "derived"),
        Number("came back", 4096, "byte", "derived"),
    ),
    (),
    "Copy it before.",
    ("cudaMemPrefetchAsync(x, 4096, 0, stream);",),
    (),
    "It no longer waits.",
    "kernels.waiting_ns>-50%",
    Gain(1000, "derived", "time of waits"),
    "high",
)


def told(*advice, silent=(), sample="real"):
    """Write the section with this advice."""
    report = Report(reports.path_of(sample))
    report.__dict__["advised"] = Advised(advice, tuple(silent))
    return report.section("advice")


def of(kind, blocks):
    return [block for block in blocks if isinstance(block, kind)]


def test_an_advice_has_its_level_its_lines_its_figures_by_kind_and_what_shows_that_it_worked():
    blocks = told(ADVICE)
    assert [block.text for block in of(Heading, blocks)] == ["Prefetch `x` (high)"]
    assert [block.lines for block in of(Code, blocks)] == [
        ADVICE.calls,
        ("nsan compare BEFORE AFTER --fail-on 'kernels.waiting_ns>-50%'",),
    ]
    points = [(point.label, point.text, point.kind) for point in blocks[4].points]
    assert points[1:] == [
        ("What it stands on:", "moved: 4.00 KiB.", "recorded"),
        ("What it stands on:", "waited: 1.000 us; came back: 4.00 KiB.", "derived"),
        ("What would show that it worked:", "It no longer waits.", "recorded"),
    ]
    assert points[0][::2] == ("What it may save:", "derived")


def test_a_bound_of_a_modelled_trace_is_derived_from_modelled_rows():
    saves = reports.points(told(ADVICE, sample="stream"))["What it may save:"]
    assert saves.kind == "derived from modelled rows"


def test_of_one_rule_three_are_told_and_the_others_counted():
    other = replace(ADVICE, rule="read_mostly", title="Mark `y`")
    blocks = told(*[ADVICE] * 5, other)
    assert [block.text for block in of(Heading, blocks)] == ["Prefetch `x` (high)"] * 3 + [
        "Mark `y` (high)"
    ]
    assert "2 more: `nsan advise um_vector_add_rtx4060l.sqlite`." in reports.texts(blocks)


def test_where_there_is_nothing_to_do_every_reason_stands_once():
    silent = [
        Silent("a", "No page bounces."),
        Silent("b", "No page bounces."),
        Silent("c", "Not told.", is_known=False),
        Silent("d", "Not told.", is_known=False),
    ]
    blocks = told(silent=silent)
    assert reports.texts(blocks) == [
        "Nothing to do, as far as is known. Why:",
        "Not known:",
    ]
    assert [[point.text for point in block.points] for block in (blocks[1], blocks[3])] == [
        ["No page bounces."],
        ["Not told."],
    ]
    assert reports.texts(told(silent=silent[:2])) == ["Nothing to do. Why:"]


def test_of_a_part_without_an_event_it_says_only_that():
    report = Report(reports.REAL, filters={"time": "500s/501s"})
    assert reports.texts(report.section("advice")) == [f"{NOTHING[0].upper()}{NOTHING[1:]}."]


@pytest.mark.parametrize("sample", ["pca_on", "hotspot_1024"])
def test_rows_of_rules_are_tables_with_their_kinds(sample):
    blocks = reports.section(sample, "advice")
    assert of(Heading, blocks)
    for table in of(Table, blocks):
        assert table.rows
        assert any(note.startswith("Figures are ") or "derived" in note for note in table.notes)
