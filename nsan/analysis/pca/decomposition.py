"""Why a step differs with the caching allocator: an account of the difference, by mechanism, that adds up.

The mechanisms are those of the design document (domain A.2): **reuse** of memory that the driver has
mapped already, **dead** traffic of memory that no tensor holds, and **packing** of several tensors into
one VA block. A part is an account of the rows, bytes and time that carry the mark of a mechanism in the
ledgers of two runs, so parts exist for any pair, recorded or modelled. A part is not what would change
without the mechanism: only switching it off tells that (:mod:`nsan.analysis.pca.switches`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, isnan, nan
from typing import Any, Final

import polars as pl

from nsan.analysis.pca.ratios import FIGURE, FIGURES, values
from nsan.analysis.result import Result, derived, reconstructed

MECHANISMS: Final = ("reuse", "dead", "packing")

PART: Final = pl.Enum(["difference", *MECHANISMS, "remainder"])

BOUND: Final = pl.Enum(["exact", "estimate", "upper"])
"""What a part is: ``exact``, nothing in it carries the mark of another mechanism; ``estimate``, at most its
systematic error does; ``upper``, all of it may: the mechanism had at most this, perhaps nothing."""

Sides = tuple[pl.DataFrame, pl.DataFrame]
"""Warm steps without and with the caching allocator."""


def _means(sides: Sides, *columns: str) -> tuple[float, ...]:
    """Give the mean of a sum of columns on each side; not a number where it is not known."""
    found = (values(steps, columns) for steps in sides)
    return tuple(nan if each is None else float(each.mean()) for each in found)


def _larger(sides: Sides, *columns: str) -> float:
    """Give the larger of both means; not a number where one is not known."""
    off, on = _means(sides, *columns)
    return nan if isnan(off + on) else max(off, on)


def _none(_: Sides) -> float:
    return 0.0


def _packed_rows(sides: Sides) -> float:
    """Count tensors beside others, each of which may have had its first touch with another one, a row less.

    Those that only the side without the cache packs, and on the other one those where first touches fell.
    """
    off, on = _means(sides, "n_packed_tensors")
    return max(off - on, 0.0) + _means(sides, "n_packed_new")[1]


def _mixed_in(sides: Sides) -> float:
    """Count dead bytes that would have come all the same with the rest of their page."""
    return sum(_means(sides, "mixed_dead_in_bytes"))


def _mixed_out(sides: Sides) -> float:
    return sum(_means(sides, "mixed_dead_out_bytes"))


def _hidden(sides: Sides, *columns: str) -> float:
    """Suppose as much computing during the service in question as is seen outside all service."""
    service, computing = _larger(sides, *columns), _larger(sides, "rest_ns")
    return nan if isnan(service + computing) else max(min(service, computing), 0.0)


def _dead_time(sides: Sides) -> float:
    return _hidden(sides, "dead_in_ns", "dead_out_ns")


def _reuse_time(sides: Sides) -> float:
    """Add up hidden computing, idle time outside calls for memory, and rows saved by packing."""
    off, on = _means(sides, "other_idle_ns")
    quickest = [steps["least_first_touch_ns"].max() for steps in sides]
    each = max((float(time) for time in quickest if isinstance(time, int | float)), default=0.0)
    return _hidden(sides, "new_only_ns") + abs(on - off) + _packed_rows(sides) * each


@dataclass(frozen=True)
class Formula:
    """How a part follows from ledgers: on less off of a sum of columns.

    Attributes
    ----------
    columns : tuple of str
        Of ``STEP_LEDGER`` and ``STEP_COSTS``; none: the mechanism cannot change the figure.
    doubt : callable or None
        Its systematic error. None: the part itself, as it is an upper bound.
    """

    columns: tuple[str, ...]
    doubt: Callable[[Sides], float] | None


FORMULAS: Final[dict[str, dict[str, Formula | None]]] = {
    "fault_rows": {
        "reuse": Formula(("n_first_touch", "n_dead_rows"), _packed_rows),
        "dead": Formula((), _none),
        "packing": None,
    },
    "in_bytes": {
        "reuse": Formula((), _none),
        "dead": Formula(("dead_in_bytes",), _mixed_in),
        "packing": Formula(("neighbour_in_bytes",), None),
    },
    "out_bytes": {
        "reuse": Formula((), _none),
        "dead": Formula(("dead_out_bytes",), _mixed_out),
        "packing": Formula(("neighbour_out_bytes",), None),
    },
    "step_ns": {
        "reuse": Formula(("idle_ns", "new_only_ns"), _reuse_time),
        "dead": Formula(("dead_in_ns", "dead_out_ns"), _dead_time),
        "packing": Formula(("neighbour_in_ns", "neighbour_out_ns"), None),
    },
}
"""By figure and mechanism. None: no row tells; it is in the remainder."""

DECOMPOSITION: Final = Result(
    "decomposition",
    "one part of the difference in one figure",
    (
        derived("figure", FIGURE, "label", "What differs."),
        derived("unit", pl.String, "label", "Unit of the values."),
        derived("part", PART, "label", "The difference itself, a mechanism, or what is left over."),
        reconstructed(
            "value",
            pl.Int64,
            "number",
            "With the caching allocator less without it, mean of a warm step, whole; null: unknown.",
        ),
        reconstructed(
            "error",
            pl.Int64,
            "number",
            "Both errors together; null: unknown, or one warm step only.",
        ),
        reconstructed(
            "systematic_error",
            pl.Int64,
            "number",
            "How much of the part may carry the mark of another mechanism, or be computing.",
        ),
        reconstructed(
            "statistical_error",
            pl.Int64,
            "number",
            "Standard error over the warm steps; null: one only.",
        ),
        derived("bound", BOUND, "label", "What kind of number the part is; null: unknown."),
    ),
    nothing="No step is warm in both conditions.",
)
"""The parts of a figure and its remainder add up to the difference, in whole numbers.

- **Fault rows.** Reuse: rows that only make memory usable for a tensor that is new to it, first touches
  and rows that bring dead bytes and nothing else. Whether the page is new, or comes back with bytes that
  nobody needs, is the same row: dead is 0, as a page that was dropped instead would fault all the same, as a
  first touch. The systematic error are tensors that lie beside others in their VA block, as one first touch
  can serve several: those that the side without the cache packs more, and on the other side those where first
  touches fell. Packing saves and makes rows, and no row says so.
- **Bytes.** A first touch moves nothing: reuse is 0. Dead bytes are known one by one; those in a page
  with living ones would move anyway, and are the error. A neighbour's bytes may be used soon after, and
  would have come all the same: an upper bound.
- **Time.** A step is idle time of the GPU, service of batches, and the rest (``STEP_COSTS``). Reuse: the
  service of the rows above without copies of dead bytes, and the idle time, as the two runs differ in no
  other work of the host than its calls for memory, which may wait for the GPU. Dead: the time of copies of
  dead bytes. Packing: that of neighbours' bytes. Errors: computing that is hidden under service or
  copies; idle time outside the calls; rows that packing saves.

What a mechanism causes elsewhere carries no mark of it, and is in the remainder: dead memory pushes living
memory out, and the order of evictions changes. Only a run without the mechanism tells that, which the
model can make (``CAUSAL_PARTS``); neither table replaces the other.
"""


@dataclass(frozen=True)
class _Part:
    """A part before it is rounded; an error that is not known is not a number."""

    value: float
    systematic: float
    statistical: float
    bound: str


def decomposition(off: pl.DataFrame, on: pl.DataFrame) -> pl.DataFrame:
    """Split the difference between two conditions by the mechanisms' marks, and a remainder.

    Parameters
    ----------
    off, on : DataFrame
        Of :func:`nsan.analysis.pca.ratios.warm_steps`: without and with the caching allocator.

    Returns
    -------
    DataFrame, ``DECOMPOSITION``
        By figure of ``FORMULAS`` and part, in the order of ``PART``.

    Notes
    -----
    Every value is a difference of means over the warm steps, rounded; the remainder is what the rounded
    parts leave of the rounded difference, so that nothing is lost. Statistical errors are standard errors
    of a difference of two means.
    """
    rows = [row for figure in FORMULAS for row in _figure(figure, (off, on))]
    return pl.DataFrame(rows, schema=DECOMPOSITION.schema)


def _figure(figure: str, sides: Sides) -> list[dict[str, Any]]:
    """Split the difference in one figure."""
    column = FIGURES[figure].column
    formulas = {name: formula for name, formula in FORMULAS[figure].items() if formula is not None}
    parts = {name: _part(formula, sides) for name, formula in formulas.items()}
    known = {name: part for name, part in parts.items() if part is not None}
    total = _difference((column,), sides)
    found = {"difference": None if total is None else _Part(total[0], 0, total[1], "exact")}
    found |= {name: known.get(name) for name in MECHANISMS}
    taken = tuple(c for name in known for c in formulas[name].columns)
    rest = _difference((column,), sides, less=taken)
    found["remainder"] = None
    if total is not None and rest is not None:
        left = round(total[0]) - sum(round(part.value) for part in known.values())
        doubt = sum(part.systematic for part in known.values())
        found["remainder"] = _Part(left, doubt, rest[1], "estimate" if doubt else "exact")
    unit = FIGURES[figure].unit
    return [{"figure": figure, "unit": unit, **_row(name, part)} for name, part in found.items()]


def _part(formula: Formula, sides: Sides) -> _Part | None:
    found = _difference(formula.columns, sides)
    if found is None:
        return None
    value, statistical = found
    if formula.doubt is None:
        return _Part(value, abs(value), statistical, "upper" if value else "exact")
    doubt = formula.doubt(sides)
    return _Part(value, doubt, statistical, "estimate" if doubt else "exact")


def _difference(
    columns: tuple[str, ...], sides: Sides, *, less: tuple[str, ...] = ()
) -> tuple[float, float] | None:
    """Give on less off of a sum of columns, a step's mean, and its standard error (nan: one step)."""
    if not columns:
        return 0.0, 0.0
    means, variance = [], 0.0
    for steps in sides:
        series = values(steps, columns)
        other = values(steps, less) if less else 0.0
        if series is None or other is None:
            return None
        series = series - other
        means.append(float(series.mean()))
        variance += float(series.var(ddof=1)) / series.size if series.size > 1 else nan
    return means[1] - means[0], variance**0.5


def _row(name: str, part: _Part | None) -> dict[str, Any]:
    if part is None:
        unknown = ("value", "error", "systematic_error", "statistical_error", "bound")
        return {"part": name, **dict.fromkeys(unknown)}
    systematic, statistical = _whole(part.systematic), _whole(part.statistical)
    both = None if systematic is None or statistical is None else systematic + statistical
    return {
        "part": name,
        "value": round(part.value),
        "error": both,
        "systematic_error": systematic,
        "statistical_error": statistical,
        "bound": part.bound,
    }


def _whole(error: float) -> int | None:
    return None if isnan(error) else ceil(error)
