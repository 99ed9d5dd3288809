"""SAMPLES judged: what moved between the base and each other condition, with noise and a least effect.

A figure is *more* or *less* only where the noise is known, Holm's adjusted test finds the difference beyond
it, and the change is at least the least effect. It is *same* where the interval of the change lies
within the least effect, or all values are equal. What neither holds of is *unclear*.

Noise is known from several runs a side: one value per run, steps averaged first, as steps of one run share
what chance gave that run. With one run a side it is known from its steps, if they are enough
(:func:`nsan.analysis.compare.statistics.settled`): then a verdict is about how much steps differ, and another
run may differ by more.

The family of Holm is all figures of all places that are judged for one condition and that vary; see
:mod:`nsan.analysis.compare.statistics`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from nsan.analysis.compare.statistics import (
    LEAST_STEPS,
    Numbers,
    change_intervals,
    coin_p,
    holm,
    means_differ,
    settled,
    steps_coin_p,
)
from nsan.analysis.compare.tables import BASE, MOVERS, SAMPLES, Measure
from nsan.analysis.result import KINDS

_WHAT: Final = ("scope", "place", "figure")
_ONE_RUN: Final = "Of one run each it is not known how much runs differ anyway: give several runs of each condition."
_FEW_STEPS: Final = (
    f"Of one run each, fewer than {LEAST_STEPS} warm steps do not tell how much steps differ anyway: give several "
    "runs of each condition."
)
_ALIKE: Final = (
    "Of one run each, a step is so much like the one before that a few of them tell no noise: give several runs of "
    "each condition."
)
_ONE_SIDE: Final = "{} has one run only: how much its runs differ is not known."


@dataclass(frozen=True)
class Judging:
    """How strict verdicts are.

    Attributes
    ----------
    min_effect : float, default 0.02
        Least change that is worth a word, as a fraction. From 0 any number is above it.
    confidence : float, default 0.95
        Of each interval; 1 less this is how often noise alone may move any figure of a condition.
    seed : int, default 1
        Of the bootstrap.
    """

    min_effect: float = 0.02
    confidence: float = 0.95
    seed: int = 1

    @property
    def level(self) -> float:
        """How often noise alone may move any figure of a condition."""
        return 1 - self.confidence


@dataclass
class Pair:
    """One figure of a condition beside that of the base, on its way to a verdict.

    Attributes
    ----------
    found : dict
        Its row of ``MOVERS``, as far as it is known. It has a verdict already where none can be reached.
    base, other : array of float
        The values that decide: of runs, or what steps are worth; empty where the figure is not known.
    grain : float
        Of the figure.
    """

    found: dict[str, Any]
    base: Numbers
    other: Numbers
    grain: float

    @property
    def is_constant(self) -> bool:
        """Whether no value varies on either side."""
        return all(bool((side == side[0]).all()) for side in (self.base, self.other))

    @property
    def coin_p(self) -> float:
        """How sure its few values can make at all; see :func:`coin_p`."""
        if self.found["noise"] == "steps":
            return steps_coin_p(self.found["n_base"], self.found["n_other"])
        return coin_p(self.base.size, self.other.size)

    @property
    def is_equal(self) -> bool:
        """Whether all values of both sides are the same."""
        return self.is_constant and bool(self.base[0] == self.other[0])


def movers(
    samples: pl.DataFrame,
    figures: Mapping[str, Measure],
    judging: Judging | None = None,
    barred: Mapping[tuple[str, str], str] | None = None,
) -> pl.DataFrame:
    """Compare each condition with the base.

    Parameters
    ----------
    samples : DataFrame, ``SAMPLES``
        What was measured; the base is condition "A".
    figures : mapping of str to Measure
        The figures by name, as :data:`nsan.comparing.figures.FIGURES`.
    judging : Judging, optional
        How strict verdicts are.
    barred : mapping, optional
        Why a figure of a condition may not be judged, by (condition, figure): its numbers are shown.

    Returns
    -------
    DataFrame, ``MOVERS``
        Conditions as in ``samples``, then scopes, places by name, and figures in the order of ``figures``.
        A figure that is not known in one run of a condition is not known of the condition.
    """
    judging, rows = judging or Judging(), pairs_of(samples, figures, barred)
    for name in dict.fromkeys(row.found["condition"] for row in rows):
        mine = [row for row in rows if row.found["condition"] == name]
        _judge([row for row in mine if row.found["verdict"] is None], judging)
    found = pl.DataFrame([row.found for row in rows], schema=MOVERS.schema)
    return found.select(MOVERS.cast())


def pairs_of(
    samples: pl.DataFrame,
    figures: Mapping[str, Measure],
    barred: Mapping[tuple[str, str], str] | None = None,
) -> list[Pair]:
    """Put each figure of each condition beside that of the base, without a verdict where one can be reached.

    Parameters
    ----------
    samples, figures, barred
        As of :func:`movers`.

    Returns
    -------
    list of Pair
        In the order of :func:`movers`.
    """
    sides = _sides(samples.select(SAMPLES.cast()))
    return [
        _row(pair, name, figures[pair["figure"]], barred or {})
        for name in samples["condition"].unique(maintain_order=True)
        if name != BASE
        for pair in _pairs(sides, name, figures).iter_rows(named=True)
    ]


# Sides ----------------------------------------------------------------------------------------------


def _sides(samples: pl.DataFrame) -> pl.DataFrame:
    """List the values of each condition: one per run, or None; and one per step of its only run."""
    value, n_runs = (
        pl.col("value"),
        samples.group_by("condition").agg(n_runs=pl.col("run").n_unique()),
    )
    runs = (
        samples.sort("condition", *_WHAT, "run", "item")
        .group_by("condition", *_WHAT, "run", maintain_order=True)
        .agg(
            mean=pl.when(value.is_not_null().all()).then(value.mean()),
            steps=value.filter(pl.col("item").is_not_null()),
            kind=pl.col("kind").max(),
        )
        .join(n_runs, on="condition", how="left", maintain_order="left")
    )
    # A run that says nothing of a figure that others have does not know it either.
    known = pl.col("mean").is_not_null().all() & (pl.len() == pl.col("n_runs").first())
    return runs.group_by("condition", *_WHAT, maintain_order=True).agg(
        runs=pl.when(known).then(pl.col("mean").implode()),
        steps=pl.col("steps").first(),
        kind=pl.col("kind").max(),
        n_runs=pl.col("n_runs").first(),
    )


def _pairs(sides: pl.DataFrame, name: str, figures: Mapping[str, Measure]) -> pl.DataFrame:
    """Put the base and a condition side by side, in the order of the result."""
    base, other = (
        sides.filter(pl.col("condition") == condition).drop("condition")
        for condition in (BASE, name)
    )
    order = pl.col("figure").replace_strict(
        [*figures], [*range(len(figures))], return_dtype=pl.Int64
    )
    return base.join(other, on=_WHAT, how="full", coalesce=True, suffix="_other").sort(
        "scope", "place", order
    )


def _row(
    pair: Mapping[str, Any],
    name: str,
    figure: Measure,
    barred: Mapping[tuple[str, str], str],
) -> Pair:
    """Take the values that decide, and say at once where there can be no verdict."""
    one_run = pair["n_runs"] == pair["n_runs_other"] == 1
    known = pair["runs"] is not None and pair["runs_other"] is not None
    steps = [np.array(pair[side] or []) for side in ("steps", "steps_other")]
    runs = [np.array(pair[side] or []) for side in ("runs", "runs_other")]
    by_steps = settled(*steps) if known and one_run else None
    base, other = steps if by_steps else runs
    noise = "steps" if by_steps else "runs" if known and min(base.size, other.size) > 1 else "none"
    found: dict[str, Any] = dict.fromkeys(MOVERS.schema)
    found |= {key: pair[key] for key in _WHAT}
    found |= {"condition": name, "unit": figure.unit, "noise": noise}
    found["kind"] = _less_certain(pair["kind"], pair["kind_other"])
    found |= {"n_base": base.size, "n_other": other.size, **_means(base, other)}
    if not known:
        found |= {"verdict": "unknown", "reason": _unknown(pair, name)}
    elif (name, pair["figure"]) in barred:
        found |= {"verdict": "unjudged", "reason": barred[name, pair["figure"]]}
    elif noise == "none":
        alone = BASE if base.size == 1 else name
        reason = _why_one_run(steps) if one_run else _ONE_SIDE.format(alone)
        found |= {"verdict": "unjudged", "reason": reason}
    if by_steps:
        base, other = by_steps
    return Pair(found, base, other, figure.grain)


def _why_one_run(steps: Sequence[Numbers]) -> str:
    """Say why one run a side tells no noise of a figure."""
    fewest = min(side.size for side in steps)
    return _ONE_RUN if not fewest else _FEW_STEPS if fewest < LEAST_STEPS else _ALIKE


def _less_certain(*kinds: str | None) -> str:
    return max((kind for kind in kinds if kind), key=KINDS.index)


def _means(base: Numbers, other: Numbers) -> dict[str, float | None]:
    """Give the means of both sides and what is between them; None where a side is not known."""
    sides = [float(side.mean()) if side.size else None for side in (base, other)]
    first, second = sides
    if first is None or second is None:
        return {"base": first, "other": second}
    # The mean of equal floats may be off by the last bit: equal sides have no difference.
    same = bool((base == base[0]).all()) and bool((other == base[0]).all())
    difference = 0.0 if same else second - first
    change = difference / first if first else None
    return {"base": first, "other": second, "difference": difference, "change": change}


def _unknown(pair: Mapping[str, Any], name: str) -> str:
    lacking = [
        condition
        for condition, runs in ((BASE, pair["runs"]), (name, pair["runs_other"]))
        if runs is None
    ]
    return f"Not recorded, or not known, in a run of {' and of '.join(lacking)}."


# Verdicts -------------------------------------------------------------------------------------------


def _judge(rows: Sequence[Pair], judging: Judging) -> None:
    """Test the figures of one condition together, and give each its verdict."""
    intervals = change_intervals(
        [(row.base, row.other) for row in rows], confidence=judging.confidence, seed=judging.seed
    )
    varying = [row for row in rows if not row.is_constant]
    tests = [means_differ(row.base, row.other, row.grain) for row in varying]
    for row, test, p in zip(varying, tests, holm([test.p for test in tests]), strict=True):
        row.found |= {"p": test.p, "p_holm": max(p, row.coin_p)}
    for row in rows:
        if row.is_constant:
            p = 1.0 if row.is_equal else row.coin_p
            row.found |= {"p": p, "p_holm": p}
    for row, (low, high) in zip(rows, intervals, strict=True):
        if row.found["change"] is not None:
            bound = high if np.isfinite(high) else None
            row.found |= {"change_low": low, "change_high": bound}
        row.found |= _verdict(row, judging)


def _verdict(row: Pair, judging: Judging) -> dict[str, str | None]:
    """Say what holds of a figure whose noise is known."""
    found, least = row.found, judging.min_effect
    change, difference = found["change"], found["difference"]
    if row.is_equal:
        return {"verdict": "same"}
    if change is not None and _is_within(row, judging):
        return {"verdict": "same"}
    one_event = row.is_constant and abs(difference) <= row.grain
    if found["p_holm"] > judging.level or one_event:
        return {"verdict": "unclear", "reason": _unclear(row, judging.level, one_event=one_event)}
    if change is not None and abs(change) < least:
        reason = f"Beyond noise, but the change is below the least effect of {least:.3g}."
        return {"verdict": "unclear", "reason": reason}
    return {"verdict": "more" if difference > 0 else "less"}


def _is_within(row: Pair, judging: Judging) -> bool:
    """Say whether the change is surely below the least effect, by the interval and by Student's t.

    Of two or three values the interval alone is too narrow to say so.
    """
    found, least = row.found, judging.min_effect
    reach = means_differ(row.base, row.other).reach(judging.confidence)
    by_t: bool = abs(found["difference"]) + reach <= least * found["base"]
    low, high = found["change_low"], found["change_high"]
    return by_t and high is not None and bool(-least <= low and high <= least)


def _unclear(row: Pair, level: float, *, one_event: bool) -> str:
    if one_event:
        return "The sides differ by one event, which runs of one condition may do."
    if row.coin_p > level:
        return "Too few values to tell a difference from two ways of running: give more runs."
    return "The difference may be noise."
