"""Limits on figures that a comparison must hold: ``migrations.bytes>+10%``.

A gate says when to fail: FIGURE, an operator and a limit. ``+10%`` and ``-10%`` are a change against the base,
``+5ms``, ``+1GiB`` and ``+3`` a difference, and a limit without a sign is one of the value itself. Of figures
of NVTX ranges and kernels ``FIGURE@NAME`` means one of them; without it each counts.

What is tested is whether a figure is beyond its limit, not whether it moved: the values of the other condition
against those of the base with the limit added, by the test of verdicts
(:func:`nsan.analysis.compare.statistics.means_differ`). All that is tested of one condition is one family (Holm).
Where no noise is known, the limit alone decides.
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

from nsan.analysis.compare.statistics import holm, means_differ
from nsan.comparing.writing import written
from nsan.errors import BadSizeError, BadTimeError, UsageError
from nsan.text import shortened
from nsan.units import parse_size, parse_time

if TYPE_CHECKING:
    from nsan.analysis.compare.movers import Pair
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
_ROUNDING: Final = 1e-12
_NOISE: Final = ": beyond the limit, but within noise"
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
    if at and not place.strip():
        raise BadGateError(text, "behind @ there is no name.")
    if any(sign.isdigit() and not sign.isascii() for sign in found["limit"]):
        raise BadGateError(text, f"{shortened(found['limit'].strip(), 40)!r} is no limit.")
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
    gates: Sequence[Gate],
    pairs: Sequence[Pair],
    conditions: Iterable[str],
    record: Mapping[str, str],
    confidence: float = 0.95,
) -> list[Gated]:
    """Hold figures against their limits.

    Parameters
    ----------
    gates : sequence of Gate
        The limits.
    pairs : sequence of Pair
        What was measured, of :func:`nsan.analysis.compare.movers.pairs_of`: of all places, also of those that
        have no row in ``MOVERS``.
    conditions : iterable of str
        Labels of all conditions that are compared with the base.
    record : mapping of str to str
        By figure: what would record it, for people.
    confidence : float, default 0.95
        1 less this is how often noise alone may bring any figure of a condition beyond its limit.

    Returns
    -------
    list of Gated
        One for each gate and condition. A figure that is not known, or that may not be judged as the conditions
        are not comparable in it, decides nothing.
    """
    by_condition = {
        label: _judged(
            gates, [pair for pair in pairs if pair.found["condition"] == label], 1 - confidence
        )
        for label in conditions
    }
    return [
        _outcome(gate, label, held[at], record)
        for at, gate in enumerate(gates)
        for label, held in by_condition.items()
    ]


@dataclass
class _Held:
    """One figure held against a limit: ``p`` is how likely noise alone brings it beyond, None where that is not asked."""

    pair: Pair
    is_beyond: bool
    p: float | None = None
    is_noise: bool = False


def _judged(gates: Sequence[Gate], pairs: Sequence[Pair], level: float) -> list[list[_Held]]:
    """Hold the figures of one condition against all limits; what is tested is one family."""
    held = [[_held(gate, pair) for pair in pairs if _is_about(gate, pair)] for gate in gates]
    tested = [(each, each.p) for mine in held for each in mine if each.p is not None]
    for (each, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        each.is_noise = p > level
    return held


def _is_about(gate: Gate, pair: Pair) -> bool:
    return gate.figure == pair.found["figure"] and gate.place in {None, pair.found["place"]}


def _held(gate: Gate, pair: Pair) -> _Held:
    """Hold one figure against a limit."""
    row = pair.found
    if row["verdict"] == "unknown" or _is_barred(row):
        return _Held(pair, is_beyond=False)
    limit = gate.limit if gate.of == "value" else _shifted(gate, row["base"])
    value = row["other"]
    if isclose(value, limit, rel_tol=_ROUNDING):
        value = limit  # 100 * 1.2 is a little less than 120
    found = _Held(pair, _OPERATORS[gate.operator](value, limit))
    if gate.of == "value" or row["noise"] == "none" or (pair.is_constant and value == limit):
        return found
    shifted = _shifted(gate, pair.base)
    p = means_differ(shifted, pair.other, pair.grain).p
    if p > 0:  # without any spread the limit alone decides
        found.p = p
    return found


def _shifted(gate: Gate, base: Any) -> Any:
    """Add the limit to values of the base."""
    return base * (1 + gate.limit) if gate.of == "change" else base + gate.limit


def _outcome(gate: Gate, condition: str, held: Sequence[_Held], record: Mapping[str, str]) -> Gated:
    """Put together what became of all that a gate is about."""
    if not held:
        return Gated(gate, condition, "undecided", _nothing(gate, record))
    found = [_said(gate, each, record) for each in held]
    for outcome in ("failed", "undecided"):
        if texts := [text for each, text in found if each == outcome]:
            return Gated(gate, condition, outcome, _joined(texts))
    beyond = [text for _, text in found if text.endswith(_NOISE)]
    return Gated(gate, condition, "passed", _joined(beyond or [text for _, text in found]))


def _nothing(gate: Gate, record: Mapping[str, str]) -> str:
    """Say that there is nothing to hold against a limit."""
    scope = gate.figure.partition(".")[0]
    if gate.figure in record:
        return f"no {gate.figure} was found. {record[gate.figure]}"
    if gate.place is not None:
        what = {"range": "NVTX range"}.get(scope, scope)
        return f"there is no {what} {shortened(gate.place, 60)} in any run."
    how = {
        "step": "no run has warm steps: mark steps with an NVTX range and name it with --nvtx",
        "range": "no run has NVTX ranges: mark ranges with NVTX, and record them",
        "kernel": "no run has kernels, or they were not recorded",
    }.get(scope, "it was not measured")
    return f"no {gate.figure} was found: {how}."


def _joined(texts: Sequence[str]) -> str:
    more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


def _said(gate: Gate, held: _Held, record: Mapping[str, str]) -> tuple[Outcome, str]:
    """Say what became of one figure."""
    row = held.pair.found
    where = f"{shortened(row['place'], 40)}: " if row["place"] else ""
    if row["verdict"] == "unknown":
        how = record.get(gate.figure, "")
        return (
            "undecided",
            f"{where}not known on both sides, and so the gate cannot pass. {how}".rstrip(),
        )
    if _is_barred(row):
        return "undecided", f"{where}{row['reason']}."
    said = where + _numbers(gate, row)
    if not held.is_beyond:
        return "passed", said
    if held.is_noise:
        return "passed", said + _NOISE
    return "failed", said


def _is_barred(row: Mapping[str, Any]) -> bool:
    """Say whether the comparison of this figure is forbidden, not only its noise unknown."""
    return row["verdict"] == "unjudged" and str(row["reason"]).startswith("not comparable")


def _numbers(gate: Gate, row: Mapping[str, Any]) -> str:
    unit = row["unit"]
    both = f"{written(row['base'], unit)} -> {written(row['other'], unit)}"
    if gate.of == "value":
        return written(row["other"], unit)
    if gate.of == "change" and row["change"] is not None:
        return f"{both}, {row['change']:+.1%}"
    return f"{both}, {'+' if row['difference'] > 0 else ''}{written(row['difference'], unit)}"
