"""Limits on figures: how they are written, when they fail, when they cannot decide."""

from __future__ import annotations

import pytest

from nsan.comparing.figures import FIGURES
from nsan.comparing.gates import BadGateError, UnknownFigureError, judge, parse_gate
from nsan.errors import UsageError


def gate(text):
    return parse_gate(text, FIGURES)


@pytest.mark.parametrize(
    ("text", "of", "limit"),
    [
        ("migrations.bytes>+10%", "change", 0.10),
        ("migrations.bytes > 10 %", "change", 0.10),
        ("migrations.bytes<=-2.5%", "change", -0.025),
        ("migrations.bytes>+1GiB", "difference", 2**30),
        ("migrations.bytes<-64KiB", "difference", -(2**16)),
        ("migrations.bytes>=3", "value", 3),
        ("duration_ns>+5ms", "difference", 5_000_000),
        ("step.time_ns>120ms", "value", 120_000_000),
        ("gpu_faults.rows>+3", "difference", 3),
        ("gpu_faults.rows>0", "value", 0),
    ],
)
def test_sign_and_unit_say_of_what_a_limit_is_one(text, of, limit):
    found = gate(text)
    assert (found.of, found.limit) == (of, pytest.approx(limit))


def test_the_name_of_a_place_may_hold_anything_a_kernel_may():
    found = gate("kernel.fault_rows@void k<float, (a)3>(int@)>=+10%")
    assert found.place == "void k<float, (a)3>(int@)"
    assert (found.figure, found.operator, found.limit) == ("kernel.fault_rows", ">=", 0.1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "migrations.bytes",
        "migrations.bytes>",
        "migrations.bytes=10%",
        ">+10%",
        "migrations.bytes>ten",
        "migrations.bytes>+5ms",
        "duration_ns>+1GiB",
        "gpu_faults.rows>+1GiB",
        "migrations.bytes>nan%",
        "migrations.bytes>inf",
        "migrations.bytes>--5",
        "migrations.bytes>+-5%",
        "migrations.bytes>1e400",
        "migrations.bytes@here>+10%",
        "step.time_ns@3>+10%",
        "\x1b[31m>\x07",
    ],
)
def test_what_is_no_limit_is_refused_with_the_form_of_one(text):
    with pytest.raises(UsageError) as caught:
        gate(text)
    assert caught.value.exit_code == 2
    said = str(caught.value)
    assert "migrations.bytes" in said
    assert "\x1b" not in said


def test_an_unknown_figure_is_refused_with_all_there_are():
    with pytest.raises(UnknownFigureError) as caught:
        gate("migration.bytes>+10%")
    said = str(caught.value)
    assert "Did you mean migrations.bytes?" in said
    assert all(name in said for name in FIGURES)


def test_a_place_is_only_of_figures_that_have_one():
    with pytest.raises(BadGateError, match="has no place"):
        gate("migrations.bytes@x>+10%")


# Judging --------------------------------------------------------------------------------------------


def row(base, other, *, figure="migrations.bytes", place="", noise="runs", verdict="more", **more):
    known = base is not None and other is not None
    return {
        "condition": "B",
        "figure": figure,
        "place": place,
        "unit": FIGURES[figure].unit,
        "base": base,
        "other": other,
        "difference": other - base if known else None,
        "change": other / base - 1 if known and base else None,
        "noise": noise,
        "verdict": verdict,
        "reason": None,
        **more,
    }


def outcome(text, *rows, record=None):
    (found,) = judge([gate(text)], rows, record or {})
    return found.outcome, found.text


def test_a_change_beyond_the_limit_and_beyond_noise_fails():
    said = outcome("migrations.bytes>+10%", row(100.0, 120.0))
    assert said == ("failed", "100 B -> 120 B, +20.0%")
    assert outcome("migrations.bytes>+20%", row(100.0, 120.0))[0] == "passed"
    assert outcome("migrations.bytes>=+20%", row(100.0, 120.0))[0] == "failed"


@pytest.mark.parametrize("verdict", ["unclear", "same"])
def test_beyond_the_limit_but_within_noise_passes_and_says_so(verdict):
    found = outcome("migrations.bytes>+10%", row(100.0, 120.0, verdict=verdict))
    assert found[0] == "passed"
    assert "within noise" in found[1]


def test_without_any_known_noise_the_limit_alone_decides():
    one_run = {"noise": "none", "verdict": "unjudged", "reason": "Of one run each ..."}
    assert outcome("migrations.bytes>+10%", row(100.0, 120.0, **one_run))[0] == "failed"
    assert outcome("migrations.bytes>+30%", row(100.0, 120.0, **one_run))[0] == "passed"


def test_any_growth_from_0_is_beyond_every_share_and_none_is_not():
    assert outcome("migrations.bytes>+500%", row(0.0, 1.0))[0] == "failed"
    assert outcome("migrations.bytes>+5%", row(0.0, 0.0, verdict="same"))[0] == "passed"


def test_a_difference_is_held_against_its_unit():
    rows = [row(1e6, 7e6, figure="duration_ns")]
    assert outcome("duration_ns>+5ms", *rows)[0] == "failed"
    assert outcome("duration_ns>+7ms", *rows)[0] == "passed"
    assert outcome("duration_ns<-1ms", *rows)[0] == "passed"


def test_a_limit_of_the_value_asks_no_noise():
    rows = [row(130e6, 130e6, figure="step.time_ns", verdict="same")]
    assert outcome("step.time_ns>120ms", *rows) == ("failed", "130.000 ms")
    assert outcome("step.time_ns>130ms", *rows)[0] == "passed"


def test_what_is_not_known_decides_nothing_and_the_switch_is_named():
    unknown = row(None, 3.0, figure="gpu_faults.rows", verdict="unknown")
    record = {"gpu_faults.rows": "A: `nsys profile --cuda-um-gpu-page-faults=true`."}
    found = outcome("gpu_faults.rows>+10%", unknown, record=record)
    assert found[0] == "undecided"
    assert "--cuda-um-gpu-page-faults=true" in found[1]


def test_what_may_not_be_compared_decides_nothing():
    barred = {"verdict": "unjudged", "reason": "not comparable: other switches"}
    found = outcome("duration_ns>+10%", row(1.0, 5.0, figure="duration_ns", **barred))
    assert found == ("undecided", "not comparable: other switches.")


def test_one_place_beyond_the_limit_fails_the_gate_of_all():
    rows = [
        row(10.0, 10.0, figure="range.fault_rows", place="a", verdict="same"),
        row(10.0, 20.0, figure="range.fault_rows", place="b"),
    ]
    failed = outcome("range.fault_rows>+10%", *rows)
    assert failed[0] == "failed"
    assert failed[1].startswith("b: 10 -> 20")
    assert outcome("range.fault_rows@a>+10%", *rows)[0] == "passed"


def test_a_place_that_is_not_there_decides_nothing():
    rows = [row(10.0, 10.0, figure="range.fault_rows", place="a")]
    found = outcome("range.fault_rows@x>+10%", *rows)
    assert found[0] == "undecided"
    assert "there is no range x" in found[1]


def test_each_condition_is_held_against_the_limit():
    rows = [row(1.0, 1.0, verdict="same"), {**row(1.0, 2.0), "condition": "C"}]
    found = judge([gate("migrations.bytes>+10%")], rows, {})
    assert [(each.condition, each.outcome) for each in found] == [("B", "passed"), ("C", "failed")]


def test_a_failure_outweighs_what_cannot_be_decided():
    rows = [
        row(None, 1.0, figure="range.fault_rows", place="a", verdict="unknown"),
        row(10.0, 20.0, figure="range.fault_rows", place="b"),
    ]
    assert outcome("range.fault_rows>+10%", *rows)[0] == "failed"
