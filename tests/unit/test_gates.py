"""Limits on figures: how they are written, when they fail, when they cannot decide."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from scipy import stats

from nsan.analysis.compare.movers import pairs_of
from nsan.analysis.compare.tables import SAMPLES
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
    for text in ("kernel.time_ns@>+1%", "kernel.time_ns@ >+1%"):
        with pytest.raises(BadGateError, match="there is no name"):
            gate(text)


@pytest.mark.parametrize(
    "text", ["migrations.n>+\u0663", "duration_ns>+\u0663ms", "duration_ns>\u0663%"]
)
def test_digits_are_those_of_ascii(text):
    with pytest.raises(BadGateError, match="is no limit"):
        gate(text)


# Judging --------------------------------------------------------------------------------------------


def runs(condition, values, figure="migrations.bytes", place=""):
    scope = FIGURES[figure].scope
    return [
        (condition, run, scope, place, None, figure, value, "recorded")
        for run, value in enumerate(values)
    ]


def sides(base, other, figure="migrations.bytes", place=""):
    return [*runs("A", base, figure, place), *runs("B", other, figure, place)]


def judged(gates, rows, *, conditions=("B",), record=None, barred=None):
    samples = pl.DataFrame(rows, schema=SAMPLES.schema, orient="row")
    pairs = pairs_of(samples, FIGURES, barred)
    return judge([gate(text) for text in gates], pairs, conditions, record or {})


def outcome(text, rows, **options):
    (found,) = judged([text], rows, **options)
    return found.outcome, found.text


MIB = 2**20
NOISY = [100e6, 101e6, 99e6, 100e6, 100e6, 100.5e6]


def times(change):
    """A duration that varies by half a percent, and what it changed to."""
    return sides(NOISY, [value * (1 + change) for value in NOISY], "duration_ns")


def test_a_change_beyond_the_limit_and_beyond_noise_fails():
    doubled = sides([100 * MIB] * 5, [120 * MIB] * 5)
    assert outcome("migrations.bytes>+10%", doubled) == (
        "failed",
        "100.00 MiB -> 120.00 MiB, +20.0%",
    )
    assert outcome("migrations.bytes>+20%", doubled)[0] == "passed"
    assert outcome("migrations.bytes>=+20%", doubled)[0] == "failed"


def test_what_is_tested_is_the_limit_and_not_whether_it_moved():
    rows = times(0.05)
    assert outcome("duration_ns>+4%", rows)[0] == "failed"
    for limit, scipy_says in (("+4%", 1.04), ("+4.9%", 1.049)):
        base = np.array(NOISY) * scipy_says
        p = stats.ttest_ind(base, np.array(NOISY) * 1.05, equal_var=False).pvalue
        found = outcome(f"duration_ns>{limit}", rows)
        assert (found[0] == "failed") == (p <= 0.05)
    assert found == (
        "passed",
        "100.083 ms -> 105.088 ms, +5.0%: beyond the limit, but within noise",
    )


def test_a_limit_below_the_least_effect_of_verdicts_holds_all_the_same():
    assert outcome("duration_ns>+0.5%", times(0.015))[0] == "failed"
    assert outcome("duration_ns>+500us", times(0.015))[0] == "failed"
    steady = sides([100 * 2 * MIB] * 5, [101 * 2 * MIB] * 5)
    for text in ("migrations.bytes>+0.5%", "migrations.bytes>+1MiB", "migrations.bytes>+0"):
        assert outcome(text, steady)[0] == "failed"
    assert outcome("migrations.n>+0", sides([100] * 5, [101] * 5, "migrations.n"))[0] == "failed"


def test_one_event_more_in_few_runs_is_within_noise():
    found = outcome("migrations.n>+0", sides([100] * 3, [101] * 3, "migrations.n"))
    assert found == ("passed", "100 -> 101, +1: beyond the limit, but within noise")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_what_must_fall_and_stays_fails_with_any_number_of_runs(n):
    still = sides([100 * MIB] * n, [100 * MIB] * n)
    assert outcome("migrations.bytes>-10%", still)[0] == "failed"
    assert outcome("migrations.bytes>=+0%", still)[0] == "failed"
    assert outcome("migrations.bytes>+0%", still)[0] == "passed"
    assert outcome("migrations.bytes>-10%", sides([100 * MIB] * n, [80 * MIB] * n))[0] == "passed"


def test_noise_around_the_limit_passes_and_says_so():
    wide = sides([90e6, 100e6, 110e6], [100e6, 140e6, 101e6], "duration_ns")
    found = outcome("duration_ns>+10%", wide)
    assert found[0] == "passed"
    assert found[1].endswith("+13.7%: beyond the limit, but within noise")


def test_limits_of_a_condition_are_one_family():
    rows = []
    for number in range(30):
        rows += sides(NOISY, [v * 1.01 for v in NOISY], "kernel.time_ns", f"k{number}")
    alone = outcome("kernel.time_ns@k3>+0%", rows)
    p = stats.ttest_ind(NOISY, np.array(NOISY) * 1.01, equal_var=False).pvalue
    assert p < 0.05 < p * 30
    apart = outcome("kernel.time_ns>+0%", rows)
    assert (alone[0], apart[0]) == ("failed", "passed")
    assert apart[1].endswith("(and 27 more)")


def test_without_any_known_noise_the_limit_alone_decides():
    for rows in (sides([100.0], [120.0]), sides([100.0], [120.0, 119.0])):
        assert outcome("migrations.bytes>+10%", rows)[0] == "failed"
        assert outcome("migrations.bytes>+30%", rows)[0] == "passed"


def test_any_growth_from_0_is_beyond_every_share_and_none_is_not():
    assert outcome("migrations.bytes>+500%", sides([0.0] * 5, [MIB] * 5))[0] == "failed"
    assert outcome("migrations.bytes>+5%", sides([0.0] * 5, [0.0] * 5))[0] == "passed"


def test_a_difference_is_held_against_its_unit():
    rows = sides([1e6], [7e6], "duration_ns")
    assert outcome("duration_ns>+5ms", rows)[0] == "failed"
    assert outcome("duration_ns>+6ms", rows)[0] == "passed"
    assert outcome("duration_ns<-1ms", rows)[0] == "passed"


def test_a_limit_of_the_value_asks_no_noise():
    rows = sides([130e6] * 3, [129e6, 131e6, 130e6], "duration_ns")
    assert outcome("duration_ns>120ms", rows) == ("failed", "130.000 ms")
    assert outcome("duration_ns>130ms", rows)[0] == "passed"


def test_what_is_not_known_decides_nothing_and_the_switch_is_named():
    record = {"gpu_faults.rows": "A: `nsys profile --cuda-um-gpu-page-faults=true`."}
    unknown = sides([None], [3.0], "gpu_faults.rows")
    found = outcome("gpu_faults.rows>+10%", unknown, record=record)
    assert found[0] == "undecided"
    assert "--cuda-um-gpu-page-faults=true" in found[1]


def test_what_may_not_be_compared_decides_nothing():
    barred = {("B", "duration_ns"): "not comparable: other switches"}
    found = outcome("duration_ns>+10%", sides([1.0], [5.0], "duration_ns"), barred=barred)
    assert found == ("undecided", "not comparable: other switches.")


FAULTS = "range.fault_rows"


def test_one_place_beyond_the_limit_fails_the_gate_of_all():
    rows = [*sides([10.0], [10.0], FAULTS, "a"), *sides([10.0], [20.0], FAULTS, "b")]
    failed = outcome("range.fault_rows>+10%", rows)
    assert failed[0] == "failed"
    assert failed[1].startswith("b: 10 -> 20")
    assert outcome("range.fault_rows@a>+10%", rows)[0] == "passed"


def test_a_place_that_is_not_there_decides_nothing():
    found = outcome("range.fault_rows@x>+10%", sides([10.0], [10.0], FAULTS, "a"))
    assert found == ("undecided", "there is no NVTX range x in any run.")


def test_a_limit_on_what_no_run_has_is_undecided_for_each_condition():
    found = judged(["range.time_ns>+10%"], [], conditions=("B", "C"))
    assert [(each.condition, each.outcome) for each in found] == [
        ("B", "undecided"),
        ("C", "undecided"),
    ]
    assert "no run has NVTX ranges" in found[0].text
    assert "--by" not in found[0].text
    record = {"kernel.time_ns": "A: kernels were not recorded."}
    assert outcome("kernel.time_ns>+1%", [], record=record)[1].endswith(record["kernel.time_ns"])


def test_each_condition_is_held_against_the_limit():
    rows = [*sides([1.0], [1.0]), *runs("C", [2.0])]
    found = judged(["migrations.bytes>+10%"], rows, conditions=("B", "C"))
    assert [(each.condition, each.outcome) for each in found] == [("B", "passed"), ("C", "failed")]


def test_a_failure_outweighs_what_cannot_be_decided():
    rows = [*sides([None], [1.0], FAULTS, "a"), *sides([10.0], [20.0], FAULTS, "b")]
    assert outcome("range.fault_rows>+10%", rows)[0] == "failed"
