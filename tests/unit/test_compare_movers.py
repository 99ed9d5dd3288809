"""What is said of a figure of two conditions: from values worked out by hand, and on noise alone."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from conftest import SOAK
from scipy import stats

from nsan.analysis.compare.movers import Judging, movers
from nsan.analysis.compare.tables import MOVERS, SAMPLES, Measure

FIGURES = {
    figure.name: figure
    for figure in (
        Measure("time", "run", "ns", "A time."),
        Measure("rows", "run", "fault rows", "A count.", 1),
        Measure("bytes", "run", "byte", "A size."),
        Measure("step.time", "step", "ns", "A time of steps."),
        Measure("kernel.time", "kernel", "ns", "A time of kernels."),
        *(Measure(f"f{number}", "run", "ns", "One of many.") for number in range(40)),
    )
}


def row(condition, run, figure, value, *, place="", item=None, kind="recorded"):
    scope = FIGURES[figure].scope
    return (condition, run, scope, place, item, figure, value, kind)


def runs(condition, figure, values, **options):
    """One value per run."""
    return [row(condition, run, figure, value, **options) for run, value in enumerate(values)]


def steps(condition, figure, values, run=0):
    """One value per step of a run; the first one was left out."""
    return [
        row(condition, run, figure, value, item=item) for item, value in enumerate(values, start=1)
    ]


def table(*parts):
    return pl.DataFrame(
        [each for part in parts for each in part], schema=SAMPLES.schema, orient="row"
    )


def judged(*parts, **options):
    """The only mover of these samples."""
    found = movers(table(*parts), FIGURES, Judging(**options))
    return found.row(0, named=True) if found.height == 1 else found


def pair(base, other, figure="time", **options):
    return judged(runs("A", figure, base), runs("B", figure, other), **options)


BASE = [100, 101, 99, 100, 100]


# Verdicts -------------------------------------------------------------------------------------------


def test_what_is_far_beyond_noise_is_more_or_less_with_its_size():
    more = pair(BASE, [150, 152, 148, 149, 151])
    assert (more["verdict"], more["noise"], more["reason"]) == ("more", "runs", None)
    assert (more["base"], more["other"], more["difference"]) == (100, 150, 50)
    assert more["change"] == pytest.approx(0.5)
    assert 0.45 < more["change_low"] < 0.5 < more["change_high"] < 0.55
    assert more["p"] == pytest.approx(
        stats.ttest_ind(BASE, [150, 152, 148, 149, 151], equal_var=False).pvalue
    )
    less = pair([150, 152, 148, 149, 151], BASE)
    assert (less["verdict"], less["difference"]) == ("less", -50)
    assert less["change"] == pytest.approx(-1 / 3)


def test_what_surely_changed_by_less_than_the_least_effect_is_the_same():
    found = pair(BASE, [100.5, 101, 99.6, 100.2, 100])
    assert found["verdict"] == "same"
    assert -0.02 < found["change_low"] < found["change_high"] < 0.02


def test_of_two_runs_a_side_the_drawn_interval_alone_says_nothing():
    found = pair([100, 101], [100.5, 101.5])
    assert -0.02 < found["change_low"] < found["change_high"] < 0.02
    # Student's t of two degrees reaches 4.3 errors of 0.71: from -2.5 % to 3.5 %.
    assert found["verdict"] == "unclear"


def test_what_changed_beyond_noise_but_by_little_is_not_a_mover():
    tight = [1000.0, 1000.1, 999.9, 1000, 1000.05]
    assert pair(tight, [value + 10 for value in tight])["verdict"] == "same"
    wide = pair([100, 103, 97, 101, 99], [101.9, 104.5, 99, 103, 101])
    assert wide["verdict"] == "unclear"
    assert "noise" in wide["reason"]
    assert pair(tight, [v + 10 for v in tight], min_effect=0.005)["verdict"] == "more"


def test_what_is_beyond_noise_and_astride_the_least_effect_says_so():
    base = [100, 100.4, 99.6, 100.2, 99.8]
    found = pair(base, [value + 1.8 for value in base])
    assert found["p_holm"] < 0.05
    assert found["change"] < 0.02 < found["change_high"]
    assert found["verdict"] == "unclear"
    assert "below the least effect of 0.02" in found["reason"]


def test_from_nothing_to_something_is_more_without_a_ratio():
    found = pair([0] * 5, [7, 9, 8, 8, 8])
    assert found["verdict"] == "more"
    assert found["difference"] == 8
    assert (found["change"], found["change_low"], found["change_high"]) == (None, None, None)
    gone = pair([7, 9, 8, 8, 8], [0] * 5)
    assert (gone["verdict"], gone["change"]) == ("less", -1)


def test_nothing_on_both_sides_is_the_same():
    found = pair([0] * 5, [0] * 5)
    assert (found["verdict"], found["difference"], found["change"]) == ("same", 0, None)


def test_equal_fractions_have_no_difference_from_rounding():
    found = pair([0.1] * 5, [0.1] * 3)
    assert (found["verdict"], found["difference"]) == ("same", 0)


def test_one_outlier_is_no_mover():
    found = pair(BASE, [100, 101, 99, 100, 100_000])
    assert found["verdict"] == "unclear"
    assert found["change"] > 100


def test_a_change_from_almost_nothing_has_no_upper_bound():
    found = pair([0, 0, 0, 0, 5], [1, 2, 1, 2, 1])
    assert (found["verdict"], found["change_high"]) == ("unclear", None)
    assert found["change_low"] < found["change"] == pytest.approx(0.4)


# Few values, and none that vary ---------------------------------------------------------------------


@pytest.mark.parametrize(("n", "verdict"), [(2, "unclear"), (3, "more"), (5, "more")])
def test_values_that_never_vary_are_sure_from_three_runs_a_side(n, verdict):
    found = pair([64] * n, [128] * n, "bytes")
    assert found["verdict"] == verdict
    assert found["p_holm"] == pytest.approx(2 * 0.25**n)


def test_two_runs_a_side_are_never_enough():
    found = pair([100, 100.01], [200, 200.01])
    assert found["verdict"] == "unclear"
    assert "Too few" in found["reason"]
    assert found["p"] < 1e-4 < found["p_holm"]


def test_one_event_more_in_every_run_is_not_enough_but_two_are():
    found = pair([3] * 5, [4] * 5, "rows")
    assert (found["verdict"], found["change"]) == ("unclear", pytest.approx(1 / 3))
    assert "one event" in found["reason"]
    assert pair([3] * 5, [5] * 5, "rows")["verdict"] == "more"
    assert pair([3] * 5, [4] * 5, "bytes")["verdict"] == "more"


def test_two_modes_that_fell_apart_are_not_surer_than_coins():
    found = pair([100, 101, 99], [200, 201, 199])
    assert found["p"] < 1e-5
    assert found["p_holm"] == pytest.approx(2 / 64)


# What is not judged ---------------------------------------------------------------------------------


def test_what_one_run_does_not_know_is_unknown_and_no_mean_of_the_rest():
    found = pair([100, None, 99, 100, 100], BASE)
    assert (found["verdict"], found["noise"]) == ("unknown", "none")
    assert (found["base"], found["other"], found["change"]) == (None, 100, None)
    assert found["reason"].endswith("in a run of A.")


def test_a_run_without_a_word_of_a_figure_does_not_know_it():
    found = judged(
        runs("A", "time", BASE),
        runs("B", "time", BASE[:4]),
        [row("B", 4, "bytes", 1)],
    )
    mine = found.filter(pl.col("figure") == "time").row(0, named=True)
    assert (mine["verdict"], mine["other"]) == ("unknown", None)
    other = found.filter(pl.col("figure") == "bytes").row(0, named=True)
    assert other["reason"] == "Not recorded, or not known, in a run of A and of B."


def test_one_run_each_shows_numbers_and_no_verdict():
    found = pair([100], [150])
    assert (found["verdict"], found["noise"], found["change"]) == ("unjudged", "none", 0.5)
    assert (found["p"], found["change_low"]) == (None, None)
    assert "several runs" in found["reason"]


@pytest.mark.parametrize(("base", "other", "alone"), [([1], [1, 2], "A"), ([1, 2], [1], "B")])
def test_one_run_against_several_says_which_side_is_alone(base, other, alone):
    found = pair(base, other)
    assert found["verdict"] == "unjudged"
    assert found["reason"].startswith(f"{alone} has one run only")


def test_a_barred_figure_shows_its_numbers_and_why():
    samples = table(runs("A", "time", BASE), runs("B", "time", [200] * 5))
    found = movers(samples, FIGURES, barred={("B", "time"): "Other switches."}).row(0, named=True)
    assert (found["verdict"], found["reason"]) == ("unjudged", "Other switches.")
    assert found["change"] == pytest.approx(1)
    assert found["p"] is None
    free = movers(samples, FIGURES, barred={("C", "time"): "Other switches."}).row(0, named=True)
    assert free["verdict"] == "more"


# Steps ----------------------------------------------------------------------------------------------


def test_with_one_run_each_steps_tell_the_noise():
    found = judged(
        steps("A", "step.time", [10, 11, 9, 10, 10, 11, 9, 10] * 2),
        steps("B", "step.time", [20, 21, 19, 20] * 4),
    )
    assert (found["verdict"], found["noise"]) == ("more", "steps")
    assert (found["n_base"], found["n_other"]) == (16, 16)
    assert (found["base"], found["other"]) == (10, 20)
    assert 0.9 < found["change_low"] < 1 < found["change_high"] < 1.1
    assert found["p_holm"] >= 0.5 * 0.9**30


def test_few_steps_of_one_run_each_give_no_verdict():
    found = judged(
        steps("A", "step.time", [10, 11, 9, 10] * 2), steps("B", "step.time", [20, 21, 19] * 5)
    )
    assert (found["verdict"], found["noise"]) == ("unjudged", "none")
    assert (found["base"], found["other"], found["p"]) == (10, 20, None)
    assert "fewer than 12 warm steps" in found["reason"]


def test_steps_of_several_runs_count_once_per_run():
    # The steps of a run agree, runs do not: 40 steps a side would be sure, 2 runs are not.
    parts = [steps("A", "step.time", [value] * 20, run) for run, value in enumerate((10, 14))]
    parts += [steps("B", "step.time", [value] * 20, run) for run, value in enumerate((13, 17))]
    found = judged(*parts)
    assert (found["n_base"], found["n_other"], found["noise"]) == (2, 2, "runs")
    assert (found["base"], found["other"]) == (12, 15)
    assert found["verdict"] == "unclear"


def test_a_run_with_an_unknown_step_is_unknown():
    found = judged(
        steps("A", "step.time", [10, None, 10, 10]), steps("B", "step.time", [20, 20, 20, 20])
    )
    assert (found["verdict"], found["base"]) == ("unknown", None)


def test_steps_that_drift_give_no_verdict():
    drift = np.linspace(100, 140, 40)
    found = judged(steps("A", "step.time", drift), steps("B", "step.time", drift + 8))
    plain = stats.ttest_ind(drift, drift + 8, equal_var=False).pvalue
    assert plain < 0.01
    assert (found["verdict"], found["noise"]) == ("unjudged", "none")
    assert "so much like the one before" in found["reason"]
    assert found["change"] == pytest.approx(8 / 120)


# Families -------------------------------------------------------------------------------------------


def test_every_figure_that_varies_makes_each_verdict_harder():
    base, other = BASE, [102, 103, 101, 102, 102.5]
    alone = pair(base, other, "f0")
    random = np.random.default_rng(2)
    rest = [
        part
        for number in range(1, 10)
        for part in (
            runs("A", f"f{number}", random.normal(10, 1, 5)),
            runs("B", f"f{number}", random.normal(10, 1, 5)),
        )
    ]
    still = [runs(side, figure, [5] * 5) for side in "AB" for figure in ("rows", "bytes")]
    found = movers(
        table(runs("A", "f0", base), runs("B", "f0", other), *rest, *still), FIGURES
    ).filter(pl.col("figure") == "f0")
    assert alone["p_holm"] == pytest.approx(max(alone["p"], 2 * 0.25**5))
    assert found["p"].item() == pytest.approx(alone["p"])
    assert found["p_holm"].item() == pytest.approx(10 * alone["p"])


def test_each_condition_is_a_family_of_its_own_against_the_base():
    found = movers(
        table(runs("A", "time", BASE), runs("B", "time", [200, 201, 199]), runs("C", "time", BASE)),
        FIGURES,
    )
    assert found.select("condition", "n_other", "verdict").rows() == [
        ("B", 3, "more"),
        ("C", 5, "same"),
    ]


def test_noise_alone_moves_a_figure_in_few_comparisons():
    random = np.random.default_rng(11)
    n_times = 1_000 if SOAK else 30
    moved = 0
    for _ in range(n_times):
        parts = []
        for number in range(20):
            own = random.lognormal(3, 0.3)
            for side in "AB":
                # Runs share luck: figures of one run go together.
                luck = random.normal(1, 0.05, 5)
                values = own * np.abs(luck + random.normal(0, 0.02 * (number % 4), 5))
                parts.append(runs(side, f"f{number}", np.round(values, number % 3)))
        found = movers(table(*parts), FIGURES)
        moved += found["verdict"].is_in(["more", "less"]).any()
    assert moved <= stats.binom.ppf(0.999, n_times, 0.05)


def test_a_change_of_five_percent_is_found_among_forty_figures_of_one_percent_noise():
    random = np.random.default_rng(12)
    found = 0
    for _ in range(10):
        parts = []
        for number in range(40):
            grown = 1.05 if number == 0 else 1
            parts += [
                runs("A", f"f{number}", random.normal(100, 1, 5)),
                runs("B", f"f{number}", random.normal(100, 1, 5) * grown),
            ]
        verdicts = movers(table(*parts), FIGURES)
        found += verdicts.filter(pl.col("figure") == "f0")["verdict"].item() == "more"
    assert found >= 8


# The table ------------------------------------------------------------------------------------------


def test_the_order_of_samples_changes_nothing_but_that_of_conditions():
    parts = [
        runs("A", "time", BASE),
        runs("B", "time", [200, 190, 210, 205, 195]),
        *(
            [
                row(side, run, "kernel.time", value * 10, place=place)
                for run, value in enumerate(BASE)
            ]
            for side in "AB"
            for place in ("b", "a")
        ),
        *(steps(side, "step.time", [1, 2, 3, 4], run) for side in "AB" for run in range(5)),
    ]
    samples = table(*parts)
    found = movers(samples, FIGURES)
    assert found.schema == MOVERS.schema
    assert found.select("scope", "place", "figure").rows() == [
        ("run", "", "time"),
        ("step", "", "step.time"),
        ("kernel", "a", "kernel.time"),
        ("kernel", "b", "kernel.time"),
    ]
    for seed in range(3):
        shuffled = samples.sample(fraction=1, shuffle=True, seed=seed)
        assert movers(shuffled, FIGURES).equals(found)


def test_of_two_kinds_the_less_certain_one_is_said():
    found = judged(
        runs("A", "time", BASE, kind="derived"), runs("B", "time", BASE, kind="reconstructed")
    )
    assert (found["kind"], found["unit"]) == ("reconstructed", "ns")
    found = judged(runs("A", "time", BASE, kind="modelled"), runs("B", "time", BASE))
    assert found["kind"] == "modelled"


def test_samples_of_one_condition_give_an_empty_table():
    found = movers(table(runs("A", "time", BASE)), FIGURES)
    assert found.schema == MOVERS.schema
    assert found.is_empty()
