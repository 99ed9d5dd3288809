"""What the caching allocator changes, pair by pair, as frames that charts and tables of a notebook are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import polars as pl

FIGURE: Final = pl.Enum(["fault_rows", "first_touches", "traffic", "step_ns"])
"""``traffic``: bytes into the GPU and out of it, together."""

PART: Final = pl.Enum(["reuse", "dead", "packing", "remainder"])

_CONDITION: Final[dict[str, pl.DataType | type[pl.DataType]]] = {
    "network": pl.String,
    "factor": pl.Float64,
    "hint": pl.String,
    "allocator": pl.String,
    "run": pl.String,
    "kind": pl.String,
}

EFFECTS: Final = pl.Schema(
    {
        **_CONDITION,
        "figure": FIGURE,
        "unit": pl.String,
        "off": pl.Float64,
        "on": pl.Float64,
        "ratio": pl.Float64,
        "ratio_low": pl.Float64,
        "ratio_high": pl.Float64,
    }
)
"""One figure of a pair: means of a warm step without (off) and with (on) the cache, on / off and its 95 %
interval as in :data:`nsan.analysis.pca.ratios.RATIOS`. ``run`` names the run with the cache; ``kind`` is the kind of
all figures of the pair."""

ACCOUNT: Final = pl.Schema(
    {
        **_CONDITION,
        "figure": FIGURE,
        "unit": pl.String,
        "part": PART,
        "value": pl.Float64,
        "error": pl.Float64,
        "low": pl.Float64,
        "high": pl.Float64,
        "difference": pl.Float64,
    }
)
"""One part of the difference in one figure of a pair, as in
:data:`nsan.analysis.pca.decomposition.DECOMPOSITION`; the parts and the remainder add up to ``difference``, on less
off. Null: unknown. From ``low`` to ``high`` is its place in a stack, in which what adds lies above 0 and what saves
below."""


def effects(document: Mapping[str, Any]) -> pl.DataFrame:
    """List what the caching allocator changes in each pair of runs.

    Parameters
    ----------
    document : mapping
        Of :func:`nsan.pca_document.pca_document`.

    Returns
    -------
    DataFrame, ``EFFECTS``
        In the order of the pairs, then of ``FIGURE``.
    """
    rows = []
    for pair in document["pairs"]:
        found = {row["figure"]: row for row in pair["ratios"]}
        found["traffic"] = {**pair["traffic"], "unit": "byte"}
        rows += [
            {**_condition(pair), "figure": figure, **_only(found[figure], EFFECTS)}
            for figure in FIGURE.categories
        ]
    return pl.DataFrame(rows, schema=EFFECTS)


def account(document: Mapping[str, Any]) -> pl.DataFrame:
    """List the parts of what the caching allocator changes, by mechanism.

    Parameters
    ----------
    document : mapping
        Of :func:`nsan.pca_document.pca_document`.

    Returns
    -------
    DataFrame, ``ACCOUNT``
        In the order of the pairs, then of ``FIGURE`` (without first touches, which have no parts), then of
        ``PART``. The parts of traffic are those of bytes in and bytes out together, and so are their errors.
    """
    rows = []
    for pair in document["pairs"]:
        found = {(row["figure"], row["part"]): row for row in pair["decomposition"]}
        for figure, parts in _SUMS.items():
            whole = _sum(found[each, "difference"]["value"] for each in parts)
            ends = {True: 0.0, False: 0.0}  # above 0, below it
            for part in PART.categories:
                several = [found[each, part] for each in parts]
                value, error = (_sum(row[key] for row in several) for key in ("value", "error"))
                about = {"figure": figure, "unit": several[0]["unit"], "part": part}
                sums = {"value": value, "error": error, "difference": whole}
                rows.append({**_condition(pair), **about, **sums, **_placed(value, ends)})
    return pl.DataFrame(rows, schema=ACCOUNT)


def _placed(value: float | None, ends: dict[bool, float]) -> dict[str, float | None]:
    """Put a part on its side of a stack, whose ends move."""
    if value is None:
        return {"low": None, "high": None}
    start = ends[value >= 0]
    ends[value >= 0] = start + value
    return {"low": min(start, start + value), "high": max(start, start + value)}


_SUMS: Final = {
    "fault_rows": ("fault_rows",),
    "traffic": ("in_bytes", "out_bytes"),
    "step_ns": ("step_ns",),
}
"""By figure here: the figures of the decomposition that it is the sum of."""


def _condition(pair: Mapping[str, Any]) -> dict[str, Any]:
    return {**_only(pair, pl.Schema(_CONDITION)), "run": ", ".join(pair["on"])}


def _only(row: Mapping[str, Any], schema: pl.Schema) -> dict[str, Any]:
    return {key: row[key] for key in schema if key in row}


def _sum(values: Any) -> float | None:
    """Add up, or None where one is not known."""
    found = list(values)
    return None if None in found else float(sum(found))
