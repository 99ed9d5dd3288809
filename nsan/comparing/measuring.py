"""Conditions measured: each run opened once, one after the other, and every figure that is asked for.

Of a run that has been measured only its numbers are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from nsan.analysis.compare.tables import SAMPLES
from nsan.asking import Asked
from nsan.comparing.figures import FIGURES, PlaceFigure, RunFigure, is_known
from nsan.errors import UsageError
from nsan.info import MODEL_KIND
from nsan.text import shortened
from nsan.units import counted
from nsan.waiting import by_kernel

if TYPE_CHECKING:
    from nsan.comparing.conditions import Condition, Run

PLACED: Final = ("range", "kernel")
"""Scopes that have places: one that a run lacks was not there, and counts 0."""

_KERNELS: Final = ("kernel", "graph")
_IN_RUN: Final = {
    name: dtype for name, dtype in SAMPLES.schema.items() if name not in {"condition", "run"}
}


@dataclass(frozen=True)
class Asking:
    """What is measured.

    Attributes
    ----------
    scopes : tuple of str
        Of "run", "step", "range", "kernel"; what is not named is not computed.
    nvtx : str
        Name of the NVTX range of a step; by default found, as :func:`nsan.analyse` of ``iterations`` does.
    warmup : int
        Steps at the beginning of each run that are left out.
    most_places : int
        Ranges, and kernels, that :func:`most_important` leaves: those in which all runs together spend most time.
    filters : dict
        Of :meth:`nsan.Trace.filter`, for all runs.
    """

    scopes: tuple[str, ...] = ("run", "step")
    nvtx: str = ""
    warmup: int = 1
    most_places: int = 50
    filters: dict[str, Any] = field(default_factory=dict)


def measure(
    conditions: Sequence[Condition],
    asking: Asking | None = None,
    tell: Callable[[str], None] | None = None,
    look: Callable[[Condition, Run, Asked], None] | None = None,
) -> pl.DataFrame:
    """Measure the figures of all runs.

    Parameters
    ----------
    conditions : sequence of Condition
        What to compare.
    asking : Asking, optional
        Scopes, steps and filters.
    tell : callable, optional
        Called with the name of each run before it is opened.
    look : callable, optional
        Called with each run while it is open; nothing of it should be kept that is large.

    Returns
    -------
    DataFrame, ``SAMPLES``
        By condition and run. What a run has not recorded is null. A range or kernel that a run does not
        have, but another one has, is 0 there: of ranges where NVTX was recorded, of kernels where those were.
        All ranges and kernels; see :func:`most_important`.

    Raises
    ------
    NsanError
        If a trace cannot be opened, no run has the range that was named for steps, or no run has a step left
        after the warm-up that was asked for.
    """
    asking = asking or Asking()
    parts, n_steps = [], list[int]()
    for condition in conditions:
        for number, run in enumerate(condition.runs):
            if tell is not None:
                tell(run.name)
            asked = Asked(run.trace, filters=asking.filters)
            if look is not None:
                look(condition, run, asked)
            own = {"condition": pl.lit(condition.label), "run": pl.lit(number, pl.Int64)}
            parts.append(measure_run(asked, asking).with_columns(**own).select(SAMPLES.cast()))
            if "step" in asking.scopes:
                n_steps.append(_count_steps(asked, asking))
    if n_steps:
        _check_steps(max(n_steps), asking)
    return _completed(pl.concat([SAMPLES.empty().collect(), *parts]))


def _count_steps(asked: Asked, asking: Asking) -> int:
    """Count the steps of a run, warm or not."""
    found = asked.rows_of("iterations", _step_options(asking))
    return 0 if found is None else int(found["step_id"].n_unique() - found["step_id"].has_nulls())


def _check_steps(most: int, asking: Asking) -> None:
    """Refuse what was asked of steps where no run can answer it."""
    if asking.nvtx and not most:
        msg = f"No run has steps by the NVTX range {shortened(asking.nvtx, 60)!r}: `nsan attribute TRACE --by nvtx` lists the ranges of a run."
        raise UsageError(msg)
    if most and asking.warmup > Asking().warmup and asking.warmup >= most:
        msg = f"To leave out {counted(asking.warmup, 'step')} at the start leaves none: no run has more than {most}."
        raise UsageError(msg)


def _step_options(asking: Asking) -> dict[str, str]:
    # A name that is not there must not give steps of kernels instead.
    return {"nvtx": asking.nvtx, "basis": "nvtx"} if asking.nvtx else {}


def measure_run(asked: Asked, asking: Asking) -> pl.DataFrame:
    """Measure the figures of one run.

    Parameters
    ----------
    asked : Asked
        The run.
    asking : Asking
        Scopes and steps.

    Returns
    -------
    DataFrame
        Columns of ``SAMPLES`` but ``condition`` and ``run``. A figure of ranges or kernels that is not known has one
        row without a place; so has one of a run that has no range or kernel, with the value 0.
    """
    ways = {"run": _of_run, "step": _of_steps, "range": _of_ranges, "kernel": _of_kernels}
    if unknown := [scope for scope in asking.scopes if scope not in ways]:
        raise UsageError(f"There is no scope {unknown[0]!r}: there are {', '.join(ways)}.")
    parts = [ways[scope](asked, asking) for scope in asking.scopes]
    found = pl.concat([pl.DataFrame(schema=_IN_RUN), *parts])
    if asked.summary["source_kind"] == MODEL_KIND:
        found = found.with_columns(kind=pl.lit("modelled", _IN_RUN["kind"]))
    return found


def _frame(rows: Iterable[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame([*rows], schema=_IN_RUN)


def _figures_of(scope: str) -> list[PlaceFigure]:
    mine = (figure for figure in FIGURES.values() if figure.scope == scope)
    return [figure for figure in mine if isinstance(figure, PlaceFigure)]


# The run as a whole ---------------------------------------------------------------------------------


def _of_run(asked: Asked, _: Asking) -> pl.DataFrame:
    def rows() -> Iterator[dict[str, Any]]:
        for figure in FIGURES.values():
            if not isinstance(figure, RunFigure):
                continue
            known = is_known(asked, figure.needs)
            value, kind = figure.of(asked) if known else (None, "derived")
            own = {"scope": "run", "place": "", "figure": figure.name}
            yield {**own, "value": value, "kind": kind}

    return _frame(rows())


# Steps ----------------------------------------------------------------------------------------------


def _of_steps(asked: Asked, asking: Asking) -> pl.DataFrame:
    """Take the warm steps; all processes and GPUs that have the step count in it."""
    found = asked.rows_of("iterations", _step_options(asking))
    figures = _figures_of("step")
    if found is None:
        return _unknown("step", figures)
    kinds = asked.kinds("iterations", found)
    warm = found.filter(pl.col("part") == "step", pl.col("step_id") >= asking.warmup)
    if not warm.height:
        return _unknown("step", figures)
    sums = [
        (pl.col(figure.column).max() if figure.unit == "ns" else _total(figure.column)).alias(
            figure.name
        )
        for figure in figures
    ]
    steps = warm.group_by(item="step_id").agg(sums).with_columns(place=pl.lit(""))
    return _melted(asked, "step", steps, kinds)


def _total(column: str) -> pl.Expr:
    """Add up; unknown where a part is unknown."""
    return pl.when(pl.col(column).is_not_null().all()).then(pl.col(column).sum())


# Ranges and kernels ---------------------------------------------------------------------------------


def _of_ranges(asked: Asked, _: Asking) -> pl.DataFrame:
    if not asked.is_recorded("nvtx"):
        return _unknown("range", _figures_of("range"))
    options = asked.nvtx_options()
    found = asked.frame("faults_by_nvtx", options)
    domain = pl.when(pl.col("domain").is_not_null()).then(pl.format("{}: ", "domain"))
    named = found.filter(pl.col("part") == "range").with_columns(
        place=pl.concat_str(domain.fill_null(""), pl.col("name").fill_null("(no text)"))
    )
    return _of_places(asked, "range", named, asked.kinds("faults_by_nvtx", found))


def _of_kernels(asked: Asked, _: Asking) -> pl.DataFrame:
    if not asked.is_recorded("kernels"):
        return _unknown("kernel", _figures_of("kernel"))
    found = by_kernel(asked)
    if found is None:
        found = asked.frame("faults_by_kernel")
    named = found.filter(pl.col("work").is_in(_KERNELS)).with_columns(
        place=pl.col("name").fill_null("(no name)")
    )
    return _of_places(asked, "kernel", named, asked.kinds("faults_by_kernel", found))


def _of_places(
    asked: Asked, scope: str, named: pl.DataFrame, kinds: dict[str, str]
) -> pl.DataFrame:
    """Add up the rows of each name, of all processes and GPUs."""
    figures = _figures_of(scope)
    sums = [_total(figure.column).alias(figure.name) for figure in figures]
    item = pl.lit(None, pl.Int64).alias("item")
    found = named.group_by("place").agg(sums).with_columns(item)
    nothing = _frame(
        {"scope": scope, "place": "", "figure": figure.name, "value": 0.0, "kind": "derived"}
        for figure in figures
    )
    rows = _melted(asked, scope, found, kinds)
    return rows if rows.height else nothing


def _unknown(scope: str, figures: Iterable[PlaceFigure]) -> pl.DataFrame:
    return _frame(
        {"scope": scope, "place": "", "figure": figure.name, "kind": "derived"}
        for figure in figures
    )


def _melted(asked: Asked, scope: str, found: pl.DataFrame, kinds: dict[str, str]) -> pl.DataFrame:
    """Turn one column per figure into one row each; null what was not recorded."""
    figures = _figures_of(scope)
    hidden = [figure.name for figure in figures if not is_known(asked, figure.needs)]
    kind_of = {figure.name: kinds[figure.column] for figure in figures}
    return (
        found.with_columns(pl.lit(None, pl.Int64).alias(name) for name in hidden)
        .unpivot(
            [figure.name for figure in figures],
            index=["place", "item"],
            variable_name="figure",
            value_name="value",
        )
        .with_columns(
            scope=pl.lit(scope),
            kind=pl.col("figure").replace_strict(kind_of, return_dtype=pl.String),
        )
        .select(pl.col(name).cast(dtype) for name, dtype in _IN_RUN.items())
    )


# All runs together ----------------------------------------------------------------------------------


def _completed(samples: pl.DataFrame) -> pl.DataFrame:
    """Say what each run has of each place."""
    placed = pl.col("scope").is_in(PLACED)
    rows = samples.filter(placed)
    if rows.is_empty():
        return samples
    places = rows.filter(pl.col("place") != "").select("scope", "place").unique()
    # A run knows a figure of a place where it has none if it knows that of any place.
    runs = rows.group_by("condition", "run", "scope", "figure").agg(
        known=pl.col("value").is_not_null().all(), _kind=pl.col("kind").max()
    )
    whole = (
        runs.join(places, on="scope")
        .join(rows, on=["condition", "run", "scope", "figure", "place"], how="left")
        .with_columns(
            value=pl.when("known").then(pl.col("value").fill_null(0.0)),
            kind=pl.coalesce("kind", "_kind"),
        )
        .select(SAMPLES.cast())
    )
    found = pl.concat([samples.filter(~placed), whole])
    return found.sort("condition", "run", "scope", "place", "figure", "item")


def most_important(
    samples: pl.DataFrame, most: int, also: Iterable[tuple[str, str]] = ()
) -> pl.DataFrame:
    """Choose the ranges and kernels in which all runs together spend most time.

    Parameters
    ----------
    samples : DataFrame, ``SAMPLES``
        What was measured.
    most : int
        Ranges, and kernels, that are chosen.
    also : iterable of (str, str)
        Scope and place of those that are chosen in any case.

    Returns
    -------
    DataFrame, ``SAMPLES``
        In the same order.
    """
    time = pl.col("value").filter(pl.col("figure").str.ends_with(".time_ns")).sum()
    places = (
        samples.filter(pl.col("scope").is_in(PLACED))
        .group_by("scope", "place")
        .agg(time=time)
        .sort("scope", "time", "place", descending=[False, True, False])
        .group_by("scope", maintain_order=True)
        .head(most)
        .select("scope", "place")
    )
    named = pl.DataFrame([*also], schema=places.schema, orient="row")
    chosen = pl.struct("scope", "place").is_in(
        pl.concat([places, named]).select(pl.struct("scope", "place")).to_series().implode()
    )
    return samples.filter(~pl.col("scope").is_in(PLACED) | chosen)


def count_places(samples: pl.DataFrame) -> dict[str, int]:
    """Count ranges and kernels, by scope.

    Parameters
    ----------
    samples : DataFrame, ``SAMPLES``
        What was measured.

    Returns
    -------
    dict of str to int
        Without scopes that have no place.
    """
    places = samples.filter(pl.col("scope").is_in(PLACED)).group_by("scope", maintain_order=True)
    return dict(places.agg(pl.col("place").n_unique()).iter_rows())
