"""Why a step differs with the caching allocator, from runs in which its mechanisms are switched off.

Only the driver model can switch a mechanism off, so what follows is cause and effect, but of the model.
With ``v(S)`` the figure of a run in which the mechanisms ``S`` are at work, the caching allocator is
``v`` of all three. With a run for each of the eight sets, the part of a mechanism is its Shapley value:
the mean, over the orders in which the three can be added, of what it adds. Mechanisms help or hinder
each other, so what it adds depends on the order: the lowest and the highest are its spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from itertools import permutations
from math import floor
from typing import Any, Final

import polars as pl

from nsan.analysis.pca.decomposition import MECHANISMS
from nsan.analysis.pca.ratios import FIGURE, FIGURES
from nsan.analysis.result import Result, derived

SWITCHES: Final = {"release": "reuse", "drop": "dead", "apart": "packing"}
"""Mechanism that each switch of the model turns off."""

CAUSAL_PART: Final = pl.Enum(["difference", *MECHANISMS, "remainder"])
METHOD: Final = pl.Enum(["shapley", "without it"])

CAUSAL_PARTS: Final = Result(
    "causal_parts",
    "one part of the difference in one figure",
    (
        derived("figure", FIGURE, "label", "What differs."),
        derived("unit", pl.String, "label", "Unit of the values."),
        derived("part", CAUSAL_PART, "label", "The difference itself, a mechanism, or the rest."),
        derived(
            "method",
            METHOD,
            "label",
            "`shapley`: its mean effect over all orders; `without it`: the effect of switching it off "
            "alone; null: no mechanism.",
        ),
        derived(
            "value", pl.Int64, "number", "On less off, mean of a warm step, whole; null: unknown."
        ),
        derived("low", pl.Int64, "number", "Least that the mechanism adds in any order."),
        derived("high", pl.Int64, "number", "Most that it adds in any order."),
    ),
    nothing="No run has a mechanism switched off.",
)
"""``difference`` is the caching allocator less none; ``remainder`` what its layout of memory costs when
all three mechanisms are off. With Shapley values the parts and the remainder add up to the difference."""


def at_work(switches: frozenset[str] | set[str]) -> frozenset[str]:
    """Name the mechanisms that are at work with some switches set.

    Parameters
    ----------
    switches : set of str
        Of ``SWITCHES``.

    Returns
    -------
    frozenset of str
        The other mechanisms.

    Examples
    --------
    >>> sorted(at_work({"drop", "apart"}))
    ['reuse']
    """
    off = {SWITCHES[switch] for switch in switches}
    return frozenset(MECHANISMS) - off


def causal_parts(
    runs: Mapping[frozenset[str], pl.DataFrame], raw: pl.DataFrame | None
) -> pl.DataFrame:
    """Split the difference by what each mechanism adds when it is switched on.

    Parameters
    ----------
    runs : mapping of frozenset of str to DataFrame
        Warm steps (:func:`nsan.analysis.pca.ratios.warm_steps`) by the mechanisms at work.
    raw : DataFrame or None
        Warm steps without the caching allocator; None: difference and remainder are unknown.

    Returns
    -------
    DataFrame, ``CAUSAL_PARTS``
        By figure and part. With all eight sets: Shapley values, which add up. With fewer: of each
        mechanism that one run switches off alone, what the caching allocator costs more than that run;
        these do not add up, and there is no remainder. Empty without either.
    """
    rows: list[dict[str, Any]] = []
    for name, figure in FIGURES.items():
        levels = {mechanisms: _level(steps, figure.column) for mechanisms, steps in runs.items()}
        base = None if raw is None else _level(raw, figure.column)
        known = {s: level for s, level in levels.items() if level is not None}
        rows += [
            {"figure": name, "unit": figure.unit, **row} for row in _figure(known, base, len(runs))
        ]
    return pl.DataFrame(rows, schema=CAUSAL_PARTS.schema)


def _level(steps: pl.DataFrame, column: str) -> Fraction | None:
    """Give the mean of a warm step; None if it is not known."""
    found = steps[column]
    if not steps.height or found.null_count():
        return None
    return Fraction(sum(found.to_list()), steps.height)


def _figure(
    levels: Mapping[frozenset[str], Fraction], raw: Fraction | None, n_runs: int
) -> list[dict[str, Any]]:
    """Split the difference in one figure."""
    everything, nothing = frozenset(MECHANISMS), frozenset[str]()
    if everything not in levels or n_runs < 2:
        return []
    whole = len(levels) == 2 ** len(MECHANISMS)
    difference = None if raw is None else levels[everything] - raw
    rest = None if raw is None or not whole else levels[nothing] - raw
    parts = _shapley(levels, rest) if whole else _alone(levels)
    if not parts:
        return []
    bare: dict[str, Any] = {"method": None, "low": None, "high": None}
    first = {"part": "difference", "value": None if difference is None else round(difference)}
    if not whole or rest is None:
        parts.append({"part": "remainder", "value": None, **bare})
    return [{**first, **bare}, *parts]


def _alone(levels: Mapping[frozenset[str], Fraction]) -> list[dict[str, Any]]:
    """Say what each mechanism adds to the two others, where a run has it off alone."""
    everything = frozenset(MECHANISMS)
    bare: dict[str, Any] = {"method": "without it", "low": None, "high": None}
    return [
        {"part": each, "value": round(levels[everything] - levels[everything - {each}]), **bare}
        for each in MECHANISMS
        if everything - {each} in levels
    ]


def _shapley(
    levels: Mapping[frozenset[str], Fraction], rest: Fraction | None
) -> list[dict[str, Any]]:
    """Average what each mechanism adds over the orders in which the three are switched on."""
    added: dict[str, list[Fraction]] = {each: [] for each in MECHANISMS}
    for order in permutations(MECHANISMS):
        for i, each in enumerate(order):
            before = frozenset(order[:i])
            added[each].append(levels[before | {each}] - levels[before])
    exact = {each: sum(steps, Fraction(0)) / len(steps) for each, steps in added.items()}
    whole = _rounded(exact if rest is None else {**exact, "remainder": rest})
    rows: list[dict[str, Any]] = []
    for each, value in whole.items():
        spread = [round(effect) for effect in added.get(each, ())]
        ends = {"low": min(spread), "high": max(spread)} if spread else {"low": None, "high": None}
        rows.append({"part": each, "method": "shapley" if spread else None, "value": value, **ends})
    return rows


def _rounded(exact: Mapping[str, Fraction]) -> dict[str, int]:
    """Round numbers so that their sum is rounded, too: those with the largest fractions go up."""
    whole = {name: floor(value) for name, value in exact.items()}
    missing = round(sum(exact.values(), Fraction(0))) - sum(whole.values())
    by_fraction = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in by_fraction[:missing]:
        whole[name] += 1
    return whole
