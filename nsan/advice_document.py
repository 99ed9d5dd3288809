"""What `nsan advise` knows, as plain containers: one JSON document, and one row per advice for CSV and Parquet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import polars as pl

from nsan.advising import Advised
from nsan.analysis.advisor.advice import Advice, Gain, Number, Rows, Target
from nsan.analysis.advisor.facts import span_ns
from nsan.analysis.catalog import find
from nsan.asking import Asked
from nsan.contract import SCHEMA
from nsan.tabular.columns import plain
from nsan.units import format_address
from nsan.what_if import Tried, WhatIf

QUESTION: Final = "What would help?"


@dataclass(frozen=True)
class Answer:
    """What is known of a trace when advice is written down.

    Attributes
    ----------
    asked : Asked
        The trace.
    found : Advised
        What the rules say of it.
    what_if : WhatIf, optional
        What the driver model says of their advice; None where nobody asked it.
    """

    asked: Asked
    found: Advised
    what_if: WhatIf | None = None

    @property
    def span_ns(self) -> int:
        """Time of the run; 0 if it is not known."""
        return span_ns(self.asked)

    def tried(self, number: int) -> Tried:
        """Give what the driver model says of an advice, by its place; nothing where nobody asked."""
        if self.what_if is None or not self.what_if.tried:
            return Tried()
        return self.what_if.tried[number]

    def kinds(self, rows: Rows) -> Mapping[str, str]:
        """Say of which kind each column of rows is."""
        if rows.analysis:
            return self.asked.kinds(rows.analysis, rows.frame)
        return dict.fromkeys(rows.frame.columns, "recorded")


def advice_document(answer: Answer) -> dict[str, Any]:
    """Make the document of `nsan advise --json`.

    Parameters
    ----------
    answer : Answer
        What is known.

    Returns
    -------
    dict
        Plain containers; its keys are explained in :mod:`nsan.contract_advice`.
    """
    summary, found = answer.asked.summary, answer.found
    return {
        "schema": SCHEMA,
        "source": summary["source"],
        "source_kind": summary["source_kind"],
        "question": QUESTION,
        "windows_ns": summary["windows_ns"],
        "duration_ns": summary["duration_ns"],
        "is_clean": found.is_clean,
        "advice": [_advice(answer, i, each) for i, each in enumerate(found.advice)],
        "silent": [asdict(each) for each in found.silent],
        "what_if": None if answer.what_if is None else _what_if(answer.what_if),
    }


def _advice(answer: Answer, place: int, advice: Advice) -> dict[str, Any]:
    tried = answer.tried(place)
    return {
        "number": place + 1,
        "rule": advice.rule,
        "level": advice.level,
        "title": advice.title,
        "finding": advice.finding,
        "targets": [_target(each) for each in advice.targets],
        "gains": [
            _gain(gain, answer.span_ns) for gain in (advice.gain, tried.gain) if gain is not None
        ],
        "not_modelled": tried.reason or None,
        "numbers": [_number(each) for each in advice.numbers],
        "rows": [_rows(answer, each) for each in advice.rows],
        "remedy": advice.remedy,
        "calls": list(advice.calls),
        "check": advice.check,
        "gate": advice.gate or None,
    }


def _target(target: Target) -> dict[str, Any]:
    return {
        "pid": target.pid,
        "allocation": target.allocation or None,
        "allocation_id": target.allocation_id,
        "va": format_address(target.va),
        "bytes": target.bytes,
        "kernel": target.kernel or None,
        "is_guessed": target.is_guessed,
    }


def _number(number: Number) -> dict[str, Any]:
    return asdict(number)


def _gain(gain: Gain, span: int) -> dict[str, Any]:
    return {
        "ns": gain.ns,
        "kind": gain.kind,
        "is_bound": gain.error_ns is None,
        "error_ns": gain.error_ns,
        "share": gain.ns / span if span > 0 else None,
        "how": gain.how,
    }


def _rows(answer: Answer, rows: Rows) -> dict[str, Any]:
    frame, kinds = rows.frame, answer.kinds(rows)
    units = {c.name: c.unit for c in find(rows.analysis).result.columns} if rows.analysis else {}
    addresses = {name for name, unit in units.items() if unit == "byte address"}
    # Of the tables of a trace only addresses are unsigned.
    unsigned = {name for name, dtype in frame.schema.items() if dtype == pl.UInt64}
    return {
        "analysis": rows.analysis or None,
        "options": dict(rows.options),
        "columns": [
            {"name": name, "unit": units.get(name), "kind": kinds.get(name)}
            for name in frame.columns
        ],
        "rows": plain(frame, [n for n in frame.columns if n in (addresses or unsigned)]),
    }


def _what_if(found: WhatIf) -> dict[str, Any]:
    return {
        "reason": found.reason or None,
        "seeds": list(found.seeds),
        "errors": list(found.errors),
    }


# One row per advice -------------------------------------------------------------------------------

_TEXT, _NUMBER = pl.String(), pl.Int64()

COLUMNS: Final[dict[str, pl.DataType]] = {
    "number": _NUMBER,
    "level": _TEXT,
    "rule": _TEXT,
    "title": _TEXT,
    "pid": _NUMBER,
    "allocation": _TEXT,
    "allocation_id": _NUMBER,
    "va": _TEXT,
    "bytes": _NUMBER,
    "kernel": _TEXT,
    "gain_ns": _NUMBER,
    "gain_kind": _TEXT,
    "gain_how": _TEXT,
    "modelled_ns": _NUMBER,
    "modelled_error_ns": _NUMBER,
    "not_modelled": _TEXT,
    "finding": _TEXT,
    "remedy": _TEXT,
    "calls": _TEXT,
    "check": _TEXT,
    "gate": _TEXT,
}
"""Columns of CSV and Parquet, with their types: a column without a value has one, too."""


def table_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Make one row per advice of what is known of it: of its targets the first.

    Parameters
    ----------
    document : mapping
        Of :func:`advice_document`.

    Returns
    -------
    list of dict
        Rows with ``COLUMNS``.
    """
    rows = []
    for advice in document["advice"]:
        target = advice["targets"][0] if advice["targets"] else {}
        bounds = [gain for gain in advice["gains"] if gain["is_bound"]]
        modelled = [gain for gain in advice["gains"] if not gain["is_bound"]]
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {key: advice[key] for key in COLUMNS if key in advice}
        row |= {key: target.get(key) for key in COLUMNS if key in target}
        row["calls"] = "\n".join(advice["calls"])
        if bounds:
            row |= {f"gain_{key}": bounds[0][key] for key in ("ns", "kind", "how")}
        if modelled:
            row |= {f"modelled_{key}": modelled[0][key] for key in ("ns", "error_ns")}
        rows.append(row)
    return rows
