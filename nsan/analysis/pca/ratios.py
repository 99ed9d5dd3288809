"""Two ways to allocate compared: what a step costs without and with the caching allocator, as ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from nsan.analysis.pca.costs import STEP_COSTS
from nsan.analysis.pca.tables import STEP_LEDGER
from nsan.analysis.result import Result, derived, reconstructed

_Numbers = npt.NDArray[np.float64]

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 4_000

_NAMES: Final = ("pid", "device_id", "step", "start_ns", "end_ns", "wall_ns")
COUNTED: Final = tuple(
    dict.fromkeys(
        name for table in (STEP_LEDGER, STEP_COSTS) for name in table.schema if name not in _NAMES
    )
)
"""Columns of a ledger with its costs that are put together over the GPUs of a step."""


@dataclass(frozen=True)
class Measured:
    """One figure that two conditions are compared by.

    Attributes
    ----------
    column : str
        Of ``STEP_LEDGER``.
    unit : str
        Of its values.
    doc : str
        What it is.
    """

    column: str
    unit: str
    doc: str


FIGURES: Final[dict[str, Measured]] = {
    "fault_rows": Measured(
        "n_fault_rows",
        "fault rows",
        "GPU fault rows in a step; one row is one driver batch, unless health says otherwise.",
    ),
    "first_touches": Measured(
        "n_first_touch", "batches", "First touches: batches that copied nothing."
    ),
    "in_bytes": Measured("in_bytes", "byte", "Migrated into the GPU in a step."),
    "out_bytes": Measured("out_bytes", "byte", "Migrated out of the GPU in a step."),
    "step_ns": Measured("wall_ns", "ns", "Time of a step."),
}
"""The figures by name."""

FIGURE: Final = pl.Enum([*FIGURES])

RATIOS: Final = Result(
    "ratios",
    "one figure of two conditions",
    (
        derived("figure", FIGURE, "label", "What is compared."),
        derived("unit", pl.String, "label", "Unit of `off` and `on`."),
        derived("n_off_steps", pl.Int64, "steps", "Warm steps without the caching allocator."),
        derived("n_on_steps", pl.Int64, "steps", "Warm steps with it."),
        derived("off", pl.Float64, "number", "Mean of a warm step without the caching allocator."),
        derived("on", pl.Float64, "number", "Mean of a warm step with it."),
        derived("ratio", pl.Float64, "number", "`on / off`; null: `off` is 0 or unknown."),
        reconstructed(
            "ratio_low",
            pl.Float64,
            "number",
            "Lower end of its 95 % interval; null: one warm step only.",
        ),
        reconstructed(
            "ratio_high",
            pl.Float64,
            "number",
            "Upper end; null: one warm step only, or without bound.",
        ),
    ),
    nothing="No step is warm in both conditions.",
)
"""Interval: percentile bootstrap over the warm steps of both conditions, each drawn by itself. It says
how much steps differ, not how much another run would; of two or three steps it is too narrow."""


def warm_steps(ledger: pl.DataFrame, *, warmup: int = 1) -> pl.DataFrame:
    """Put the GPUs of each step together, and leave out the first steps.

    A figure that is not known in one of the steps that are left (the history of the allocator does not
    reach it, for instance) has no mean, no ratio and no parts: leave out more steps.

    Parameters
    ----------
    ledger : DataFrame, ``STEP_LEDGER`` with the columns of ``STEP_COSTS``
        One row per step and GPU of one run. Costs that are not there are unknown.
    warmup : int, default 1
        Steps that are left out: in the first ones the driver meets every page for the first time.

    Returns
    -------
    DataFrame
        One row per step, in order: ``step``, ``wall_ns`` (the longest of its processes) and the columns
        of ``COUNTED``: counts and bytes are sums over the GPUs, times (Float64) means, as GPUs work at the
        same time. Null where that of a GPU is not known.
    """
    absent = [name for name in COUNTED if name not in ledger.columns]
    known = ledger.with_columns(pl.lit(None, pl.Int64).alias(name) for name in absent)
    columns = [
        pl.when(pl.col(name).is_not_null().all())
        .then(pl.col(name).mean() if name.endswith("_ns") else pl.col(name).sum())
        .alias(name)
        for name in COUNTED
    ]
    return (
        known.filter(pl.col("step") >= warmup)
        .group_by("step")
        .agg(pl.col("wall_ns").max(), *columns)
        .sort("step")
    )


def ratios(off: pl.DataFrame, on: pl.DataFrame, *, seed: int = 1) -> pl.DataFrame:
    """Compare the figures of a step without and with the caching allocator.

    Parameters
    ----------
    off, on : DataFrame
        Of :func:`warm_steps`, of one run or of several together.
    seed : int, default 1
        Of the bootstrap; the same seed gives the same intervals.

    Returns
    -------
    DataFrame, ``RATIOS``
        One row per figure, in the order of ``FIGURES``. 0 over 0 and any number over 0 is no ratio: null.
    """
    n_steps = {"n_off_steps": off.height, "n_on_steps": on.height}
    rows = [
        {"figure": name, "unit": figure.unit, **n_steps}
        | ratio_of(off, on, (figure.column,), seed=seed)
        for name, figure in FIGURES.items()
    ]
    frame = pl.DataFrame(rows, schema_overrides=RATIOS.schema)
    return frame.select(RATIOS.cast())


def ratio_of(
    off: pl.DataFrame, on: pl.DataFrame, columns: tuple[str, ...], *, seed: int = 1
) -> dict[str, float | None]:
    """Compare a sum of columns without and with the caching allocator.

    Parameters
    ----------
    off, on : DataFrame
        Of :func:`warm_steps`.
    columns : tuple of str
        At least one.
    seed : int, default 1
        Of the bootstrap.

    Returns
    -------
    dict
        ``off``, ``on``, ``ratio``, ``ratio_low`` and ``ratio_high`` as in ``RATIOS``.
    """
    return _compared(values(off, columns), values(on, columns), seed)


def values(steps: pl.DataFrame, columns: tuple[str, ...]) -> _Numbers | None:
    """Add up columns of the warm steps.

    Parameters
    ----------
    steps : DataFrame
        Of :func:`warm_steps`.
    columns : tuple of str
        At least one.

    Returns
    -------
    array of float or None
        One number per step; None where one is not known, or there is no step.
    """
    chosen = steps.select(columns)
    if not chosen.height or any(chosen.null_count().row(0)):
        return None
    found: _Numbers = np.asarray(chosen.to_numpy(), dtype=np.float64).sum(axis=1)
    return found


def _compared(off: _Numbers | None, on: _Numbers | None, seed: int) -> dict[str, float | None]:
    row: dict[str, float | None] = {
        "off": None if off is None else float(off.mean()),
        "on": None if on is None else float(on.mean()),
        "ratio": None,
        "ratio_low": None,
        "ratio_high": None,
    }
    if off is None or on is None or off.mean() == 0:
        return row
    low, high = _interval(off, on, seed)
    return row | {"ratio": float(on.mean() / off.mean()), "ratio_low": low, "ratio_high": high}


def _interval(off: _Numbers, on: _Numbers, seed: int) -> tuple[float | None, float | None]:
    """Draw the steps of each condition again and again, and take the middle 95 % of the ratios."""
    if off.size < 2 or on.size < 2:
        return None, None
    draw = np.random.default_rng(seed)
    above = on[draw.integers(on.size, size=(RESAMPLES, on.size))].mean(axis=1)
    below = off[draw.integers(off.size, size=(RESAMPLES, off.size))].mean(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = above / below
    # No fault at all in some resample: 0 over 0 says nothing, and a number over 0 has no bound.
    found = found[~np.isnan(found)]
    ends = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    low, high = np.quantile(found, ends, method="inverted_cdf")
    return _finite(low), _finite(high)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
