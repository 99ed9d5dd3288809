"""The two tables of a comparison: what was measured in each run, and what differs between conditions.

``SAMPLES`` is made by :func:`nsan.comparing.measuring.measure` and judged by
:func:`nsan.analysis.compare.movers.movers`, which gives ``MOVERS``. Condition "A" is the base; each other
condition is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from nsan.analysis.result import KIND, Result, derived, reconstructed

BASE: Final = "A"
"""The condition that others are compared with."""

SCOPES: Final = ("run", "step", "range", "kernel")
NOISES: Final = ("runs", "steps", "none")
VERDICTS: Final = ("more", "less", "same", "unclear", "unjudged", "unknown")

SCOPE: Final = pl.Enum(SCOPES)
NOISE: Final = pl.Enum(NOISES)
VERDICT: Final = pl.Enum(VERDICTS)


@dataclass(frozen=True)
class Measure:
    """A figure that conditions are compared by.

    Attributes
    ----------
    name : str
        As people write it, as ``migrations.bytes``; no two scopes share one.
    scope : str
        Of :data:`SCOPES`.
    unit : str
        Of its values.
    doc : str
        What it is, in a sentence.
    grain : float, default 0
        What one event more or less changes it by: 1 where it counts what the driver happens to do. Less
        than that tells nothing. 0 where the program alone decides it, and of times.
    """

    name: str
    scope: str
    unit: str
    doc: str
    grain: float = 0.0


SAMPLES: Final = Result(
    "samples",
    "one figure of one run of a condition, or of one step of it",
    (
        derived("condition", pl.String, "label", "Condition: A, B, ..."),
        derived("run", pl.Int64, "id", "Number of the run in its condition, from 0."),
        derived("scope", SCOPE, "label", "What is measured: the run, a step, a range, a kernel."),
        derived(
            "place",
            pl.String,
            "text",
            "Name of the NVTX range or kernel; empty of the run and of steps.",
        ),
        derived("item", pl.Int64, "id", "Number of the step, from 0; null: the run as a whole."),
        derived("figure", pl.String, "label", "Name of the figure."),
        derived("value", pl.Float64, "number", "Its value; null: not recorded, or not known."),
        derived("kind", KIND, "label", "Kind of the value."),
    ),
    nothing="Nothing was measured.",
)

MOVERS: Final = Result(
    "movers",
    "one figure of a condition against the base",
    (
        derived("condition", pl.String, "label", "Condition: B, C, ...; the base is A."),
        derived("scope", SCOPE, "label", "What is measured: the run, a step, a range, a kernel."),
        derived("place", pl.String, "text", "Name of the NVTX range or kernel, else empty."),
        derived("figure", pl.String, "label", "Name of the figure."),
        derived("unit", pl.String, "label", "Unit of `base` and `other`."),
        derived("kind", KIND, "label", "Kind of both, of two kinds the less certain one."),
        derived("n_base", pl.Int64, "values", "Values of the base: runs, or warm steps."),
        derived("n_other", pl.Int64, "values", "Values of the other condition."),
        derived(
            "base", pl.Float64, "number", "Mean of the base; null: unknown in one of its runs."
        ),
        derived("other", pl.Float64, "number", "Mean of the other; null likewise."),
        derived("difference", pl.Float64, "number", "`other - base`."),
        derived("change", pl.Float64, "fraction", "`other / base - 1`; null: the base is 0."),
        reconstructed(
            "change_low",
            pl.Float64,
            "fraction",
            "Lower end of the interval of the change; null: no noise known, or the base is 0.",
        ),
        reconstructed(
            "change_high", pl.Float64, "fraction", "Upper end; null likewise, or without bound."
        ),
        derived("noise", NOISE, "label", "How much values differ anyway is known from these."),
        reconstructed("p", pl.Float64, "number", "How likely such a difference is by noise alone."),
        reconstructed(
            "p_holm",
            pl.Float64,
            "number",
            "For all figures together (Holm), and for so few values.",
        ),
        reconstructed("verdict", VERDICT, "label", "More, less, same, unclear, unjudged, unknown."),
        derived(
            "reason", pl.String, "sentence", "Why there is no verdict; null where there is one."
        ),
    ),
    nothing="No figure was measured in the base and in another condition.",
)
