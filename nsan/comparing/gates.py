"""Limits on figures that a comparison must hold: ``migrations.bytes>+10%``.

A gate says when to fail: FIGURE, an operator and a limit. ``+10%`` and ``-10%`` are a change against the base,
``+5ms``, ``+1GiB`` and ``+3`` a difference, and a limit without a sign is one of the value itself. Of figures
of NVTX ranges and kernels ``FIGURE@NAME`` means one of them; without it each counts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from math import isclose
from typing import TYPE_CHECKING, Any, Final, Literal

from nsan.comparing.writing import written
from nsan.errors import BadSizeError, BadTimeError, UsageError
from nsan.text import shortened
from nsan.units import parse_size, parse_time

if TYPE_CHECKING:
    from nsan.analysis.compare.tables import Measure

Of = Literal["change", "difference", "value"]
Outcome = Literal["passed", "failed", "undecided"]

_GATE: Final = re.compile(r"(?P<what>.+?)\s*(?P<op>>=|<=|>|<)\s*(?P<limit>[^<>=]+)", re.DOTALL)
_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_NUMBER: Final = re.compile(r"\d{1,15}(\.\d{1,9})?")
_FORM: Final = (
    "Write FIGURE, an operator (> < >= <=) and a limit: migrations.bytes>+10%, duration_ns>+5ms, "
    "gpu_faults.rows>+3, step.time_ns>120ms, range.fault_rows@forward>+10%."
)


class BadGateError(UsageError):
    """A text is no gate."""

    def __init__(self, text: str, reason: str) -> None:
        self.text, self.reason = text, reason
        super().__init__(f"--fail-on {shortened(text)!r}: {reason} {_FORM}")


class UnknownFigureError(UsageError):
    """A gate names a figure that there is not."""

    def __init__(self, text: str, name: str, names: Iterable[str]) -> None:
        self.text, self.name, self.names = text, name, list(names)
        close = get_close_matches(name[:80], self.names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        super().__init__(
            f"--fail-on {shortened(text)!r}: there is no figure {shortened(name, 60)!r}.{hint}\n"
            f"There are: {', '.join(self.names)}."
        )


@dataclass(frozen=True)
class Gate:
    """A limit.

    Attributes
    ----------
    text : str
        As it was written.
    figure : str
        Name of the figure.
    place : str or None
        NVTX range or kernel; None: each.
    operator : str
        ">", "<", ">=" or "<=".
    of : str
        What is limited: "change", "difference" or "value".
    limit : float
        As a fraction, or in the unit of the figure.
    """

    text: str
    figure: str
    place: str | None
    operator: str
    of: Of
    limit: float


@dataclass(frozen=True)
class Gated:
    """What became of a gate.

    Attributes
    ----------
    gate : Gate
        The limit.
    condition : str
        Label of the condition that was compared with the base.
    outcome : str
        "passed", "failed" or "undecided".
    text : str
        Why, for people.
    """

    gate: Gate
    condition: str
    outcome: Outcome
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        gate = self.gate
        return {
            "gate": gate.text,
            "condition": self.condition,
            "figure": gate.figure,
            "place": gate.place,
            "operator": gate.operator,
            "of": gate.of,
            "limit": gate.limit,
            "outcome": self.outcome,
            "text": self.text,
        }


# Reading --------------------------------------------------------------------------------------------


def parse_gate(text: str, figures: Mapping[str, Measure]) -> Gate:
    """Read a gate.

    Parameters
    ----------
    text : str
        FIGURE[@PLACE] OPERATOR LIMIT.
    figures : mapping of str to Measure
        The figures by name.

    Returns
    -------
    Gate
        What it says.

    Raises
    ------
    UsageError
        If it has another form, or there is no such figure; the message lists those there are.
    """
    found = _GATE.fullmatch(text.strip())
    if found is None:
        raise BadGateError(text, "this is no limit.")
    name, at, place = found["what"].strip().partition("@")
    if name not in figures:
        raise UnknownFigureError(text, name, figures)
    figure = figures[name]
    if at and figure.scope not in {"range", "kernel"}:
        raise BadGateError(
            text, f"{name} has no place; @NAME is for figures of ranges and kernels."
        )
    of, limit = _limit(text, found["limit"].strip(), figure.unit)
    return Gate(text, name, place if at else None, found["op"], of, limit)


def _limit(text: str, limit: str, unit: str) -> tuple[Of, float]:
    """Read a limit: its sign and unit say of what it is one."""
    sign = -1.0 if limit.startswith("-") else 1.0
    size = limit[1:].strip() if limit[:1] in {"+", "-"} else limit
    if size.endswith("%"):
        number = size.removesuffix("%").strip()
        if not _NUMBER.fullmatch(number):
            raise BadGateError(text, f"{shortened(limit, 40)!r} is no share.")
        return "change", sign * float(number) / 100
    of: Of = "difference" if limit[:1] in {"+", "-"} else "value"
    return of, sign * _amount(text, size, unit)


def _amount(text: str, size: str, unit: str) -> float:
    """Read an amount in the unit of a figure; without a unit it is in that one."""
    if _NUMBER.fullmatch(size):
        return float(size)
    read = {"ns": parse_time, "byte": parse_size}.get(unit)
    if read is not None and not size.startswith("-"):
        with suppress(BadTimeError, BadSizeError):
            return float(read(size))
    what = {"ns": "time, as 5ms", "byte": "size, as 1GiB"}.get(unit, f"number of {unit}")
    raise BadGateError(text, f"{shortened(size, 40)!r} is no {what}.")


# Judging --------------------------------------------------------------------------------------------


def judge(
    gates: Iterable[Gate], rows: Sequence[Mapping[str, Any]], record: Mapping[str, str]
) -> list[Gated]:
    """Hold figures against their limits.

    Parameters
    ----------
    gates : iterable of Gate
        The limits.
    rows : sequence of mapping
        Of ``MOVERS``.
    record : mapping of str to str
        By figure: what would record it, for people.

    Returns
    -------
    list of Gated
        One for each gate and condition. A figure that is not known, or that may not be judged as the conditions
        are not comparable in it, decides nothing.
    """
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    return [_judged(gate, label, rows, record) for gate in gates for label in conditions]


def _judged(
    gate: Gate, condition: str, rows: Sequence[Mapping[str, Any]], record: Mapping[str, str]
) -> Gated:
    mine = [
        row
        for row in rows
        if row["condition"] == condition
        and row["figure"] == gate.figure
        and gate.place in {None, row["place"]}
    ]
    if not mine:
        return Gated(gate, condition, "undecided", _nothing(gate))
    found = [_held(gate, row, record) for row in mine]
    for outcome in ("failed", "undecided"):
        if texts := [text for each, text in found if each == outcome]:
            return Gated(gate, condition, outcome, _joined(texts))
    beyond = [text for _, text in found if "within noise" in text]
    return Gated(gate, condition, "passed", _joined(beyond or [text for _, text in found]))


def _nothing(gate: Gate) -> str:
    if gate.place is not None:
        return f"there is no {gate.figure.partition('.')[0]} {shortened(gate.place, 60)} in either."
    scope = gate.figure.partition(".")[0]
    how = {
        "step": "mark steps with an NVTX range and name it with --nvtx",
        "range": "add --by range, and mark ranges with NVTX",
        "kernel": "add --by kernel",
    }.get(scope, "it was not measured")
    return f"no {gate.figure} was found: {how}."


def _joined(texts: Sequence[str]) -> str:
    more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _held(gate: Gate, row: Mapping[str, Any], record: Mapping[str, str]) -> tuple[Outcome, str]:
    """Hold one row against a limit."""
    where = f"{shortened(row['place'], 40)}: " if row["place"] else ""
    if row["verdict"] == "unknown":
        how = record.get(gate.figure, "")
        return (
            "undecided",
            f"{where}not known on both sides, and so the gate cannot pass. {how}".rstrip(),
        )
    if _is_barred(row):
        return "undecided", f"{where}{row['reason']}."
    value = _value(gate, row)
    if isclose(value, gate.limit, rel_tol=1e-9):
        value = gate.limit  # 120 / 100 - 1 is a little less than 0.2
    said = where + _said(gate, row)
    if not _OPERATORS[gate.operator](value, gate.limit):
        return "passed", said
    if gate.of == "value" or row["noise"] == "none" or row["verdict"] in {"more", "less"}:
        return "failed", said
    return "passed", f"{said}: beyond the limit, but within noise ({row['verdict']})"


def _is_barred(row: Mapping[str, Any]) -> bool:
    """Say whether the comparison of this figure is forbidden, not only its noise unknown."""
    return row["verdict"] == "unjudged" and str(row["reason"]).startswith("not comparable")


def _value(gate: Gate, row: Mapping[str, Any]) -> float:
    """Give what is limited; any growth from 0 is beyond each share."""
    if gate.of == "value":
        return float(row["other"])
    if gate.of == "difference":
        return float(row["difference"])
    if row["change"] is not None:
        return float(row["change"])
    return float("inf") if row["difference"] > 0 else 0.0


def _said(gate: Gate, row: Mapping[str, Any]) -> str:
    unit = row["unit"]
    both = f"{written(row['base'], unit)} -> {written(row['other'], unit)}"
    if gate.of == "value":
        return written(row["other"], unit)
    if gate.of == "change" and row["change"] is not None:
        return f"{both}, {row['change']:+.1%}"
    return f"{both}, {'+' if row['difference'] > 0 else ''}{written(row['difference'], unit)}"
