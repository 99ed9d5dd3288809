"""What `nsan pca` says to people: a sentence for each pair, then the tables it stands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nsan.tabular.text import Field, Row, dash, name, table
from nsan.units import counted, format_bytes, format_count, format_time

_FIGURES: Final = {
    "fault_rows": "Fault rows",
    "first_touches": "First touches",
    "in_bytes": "Bytes in",
    "out_bytes": "Bytes out",
    "step_ns": "Step time",
}
_PARTS: Final = ("reuse", "dead", "packing", "remainder")
_MECHANISMS: Final = {
    "reuse": "reuse",
    "dead": "dead traffic",
    "packing": "packing",
    "remainder": "other",
}
_EQUAL: Final = 0.005
"""Ratios nearer to 1 are called about the same."""

_FEW_STEPS: Final = 5
_SMALL: Final = 0.1
"""Parts below this share of the largest are not in a sentence."""

_RATIO_FIELDS: Final = (
    Field("factor", "Factor", lambda value: "" if value is None else str(value)),
    Field("hint", "Hint", lambda value: value or "", right=False),
    Field("allocator", "Allocator", lambda value: value or "", right=False),
    Field("figure", "Per step", str, right=False),
    Field("off", "Off", str),
    Field("on", "On", str),
    Field("ratio", "On / off", str),
    Field("interval", "95 % interval", str),
)
_PART_FIELDS: Final = (
    *_RATIO_FIELDS[:4],
    Field("difference", "On - off", str),
    Field("reuse", "Reuse", str),
    Field("dead", "Dead", str),
    Field("packing", "Packing", str),
    Field("remainder", "Remainder", str),
)
_CAUSAL_FIELDS: Final = (
    *_RATIO_FIELDS[:2],
    *_PART_FIELDS[3:],
)


def text_of(
    document: Mapping[str, Any],
    *,
    markdown: bool = False,
    verbose: bool = False,
    sentences: bool = True,
) -> str:
    """Write the comparison for people.

    Parameters
    ----------
    document : mapping
        What JSON holds.
    markdown : bool, default False
        As Markdown.
    verbose : bool, default False
        Also the pairs whose caching allocator has a mechanism switched off, where there are others.
    sentences : bool, default True
        With the sentences and the notes on pairs; without them where both are said already.

    Returns
    -------
    str
        Sentences, tables, and what the figures are worth.
    """
    # Without sentences it stands below a heading of somebody else.
    heading, bullet = ("## " if sentences else "### ") * markdown, "- " * markdown
    causal, pairs = document["switches"], _shown(document, verbose=verbose)
    said = sentences_of(document, verbose=verbose) if sentences else []
    parts = ["\n".join(bullet + name(each, markdown=markdown) for each in said)]
    if hidden := len(document["pairs"]) - len(pairs):
        parts += [f"({counted(hidden, 'more pair')} with switches set: -v)"]
    parts += [heading + _ratio_head(pairs)]
    parts += [
        table(_blocks(pairs, _ratio_rows), _told_apart(_RATIO_FIELDS, pairs), markdown=markdown)
    ]
    parts += [_ratio_note(pairs)]
    parts += [f"{heading}An account of the difference: what carries the mark of each mechanism"]
    parts += [
        table(_blocks(pairs, _part_rows), _told_apart(_PART_FIELDS, pairs), markdown=markdown)
    ]
    parts += [_PART_NOTE]
    if causal:
        parts += [f"{heading}{_causal_head(causal)}"]
        fields = _told_apart(_CAUSAL_FIELDS, causal)
        parts += [table(_blocks(causal, _causal_rows), fields, markdown=markdown)]
        parts += [_causal_note(causal)]
    notes = [note for pair in pairs for note in pair["notes"]] + list(document["notes"])
    shown = dict.fromkeys(notes if sentences else [])
    parts += ["\n".join(f"{bullet}Note: {name(n, markdown=markdown)}" for n in shown)]
    return "\n\n".join(part for part in [*parts, _kinds(document)] if part) + "\n"


def sentences_of(document: Mapping[str, Any], *, verbose: bool = False) -> list[str]:
    """Say in a sentence for each pair what the caching allocator changes.

    Parameters
    ----------
    document : mapping
        What JSON holds.
    verbose : bool, default False
        Also the pairs whose caching allocator has a mechanism switched off, where there are others.

    Returns
    -------
    list of str
        Plain text; names in it are not escaped.
    """
    by_key = {_key(each): each for each in document["switches"]}
    return [_sentence(p, by_key.get(_key(p))) for p in _shown(document, verbose=verbose)]


def _shown(document: Mapping[str, Any], *, verbose: bool) -> list[Any]:
    """Choose the pairs that people are told of."""
    pairs = [pair for pair in document["pairs"] if verbose or ":" not in pair["allocator"]]
    return pairs or document["pairs"]


def _key(condition: Mapping[str, Any]) -> tuple[Any, ...]:
    return condition["network"], condition["factor"], condition["hint"]


# Sentences ------------------------------------------------------------------------------------------


def _sentence(pair: Mapping[str, Any], causal: Mapping[str, Any] | None) -> str:
    """Say in one sentence what the caching allocator changes in a pair, and where the account puts it."""
    found = {row["figure"]: row for row in pair["ratios"]}
    parts: dict[str, dict[str, Any]] = {}
    for row in pair["decomposition"]:
        parts.setdefault(row["figure"], {})[row["part"]] = row["value"]
    who, base = _named(pair)
    rows, traffic, time = found["fault_rows"], pair["traffic"], found["step_ns"]
    bytes_moved = _both(parts["in_bytes"], parts["out_bytes"])
    said = [
        _change(rows, "fault rows", "many", base) + _why(rows, parts["fault_rows"], "rows"),
        _change(traffic, "traffic", "much", base) + _why(traffic, bytes_moved, "byte"),
    ]
    faster = _faster(time) + _why(time, parts["step_ns"], "ns")
    plain = pair["allocator"] == "caching"
    return f"{_where(pair)}{who} makes {', '.join(said)}, and {faster}.{_switched(causal, plain=plain)}"


def _named(pair: Mapping[str, Any]) -> tuple[str, str]:
    """Name what is compared, and what it is compared with."""
    if pair["allocator"] == "raw":
        off, on = pair["off"][0], pair["on"][0]
        return on, "in the same run again" if off == on else f"in {off}"
    return "the caching allocator" if pair["allocator"] == "caching" else pair[
        "allocator"
    ], "without it"


def _where(pair: Mapping[str, Any]) -> str:
    parts = [pair["network"] or ""]
    if pair["factor"] is not None:
        parts.append(f"factor {pair['factor']:g}")
    if pair["hint"] not in {None, "none"}:
        parts.append(f"hint {pair['hint']}")
    where = ", ".join(filter(None, parts))
    if not where or pair["allocator"] == "raw":
        against = f"{pair['on'][0]} against {pair['off'][0]}"
        where = f"{where}, {against}" if where else against
    return f"{where}: "


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Add up the parts of two figures; None where either is not known."""
    pairs = {part: (first[part], second[part]) for part in first}
    return {part: None if None in both else sum(both) for part, both in pairs.items()}


def _change(row: Row, what: str, so: str, base: str) -> str:
    """Say how a figure changes from one side to the other."""
    off, on = row["off"], row["on"]
    if off is None or on is None:
        return f"an unknown change of {what}"
    if off == 0:
        return f"no {what}, as {base}" if on == 0 else f"{what}, where there is none {base}"
    ratio = on / off
    if ratio == 0:
        return f"no {what} any more"
    if _is_equal(row):
        return f"about as {so} {what}"
    less = {"many": "fewer", "much": "less"}[so]
    if ratio >= 2:
        return f"{ratio:.3g} times as {so} {what}"
    return f"{abs(ratio - 1):.1%} {less if ratio < 1 else 'more'} {what}".replace("%", " %")


def _faster(row: Row) -> str:
    ratio = row["ratio"]
    if ratio is None:
        return "the time of a step is unknown"
    if _is_equal(row):
        return "a step takes about the same time"
    if ratio < 1:
        return f"a step is {1 / ratio:.2f} times as fast"
    return f"a step takes {ratio:.2f} times as long"


def _is_equal(row: Row) -> bool:
    """Say whether a ratio is 1 as far as can be told: it is near, or its interval holds 1."""
    ratio, low, high = row["ratio"], row["ratio_low"], row["ratio_high"]
    holds = low is not None and low <= 1 and (high is None or high >= 1)
    return bool(holds or abs(ratio - 1) < _EQUAL)


def _why(row: Row, parts: Mapping[str, Any], unit: str) -> str:
    """Say how sure a ratio is, and name the parts that count."""
    sure = ""
    if row["ratio"] is not None:
        interval = _interval(row)
        sure = f"{_number(row['ratio'])} times, "
        sure += "one warm step" if interval == "-" else f"95 % interval {interval}"
    told = "; ".join(filter(None, [sure, _by(parts, unit)]))
    return f" ({told})" if told else ""


def _by(parts: Mapping[str, Any], unit: str) -> str:
    """Name the parts that count, the largest first; what is small beside the largest is left out."""
    known = {part: parts[part] for part in _PARTS if parts.get(part)}
    largest = max(map(abs, known.values()), default=0)
    told = sorted(known, key=lambda part: -abs(known[part]))
    return ", ".join(
        f"{_MECHANISMS[part]} {_signed(known[part], unit)}"
        for part in told
        if abs(known[part]) >= _SMALL * largest
    )


def _switched(causal: Mapping[str, Any] | None, *, plain: bool) -> str:
    """Say what the mechanisms do to the time of a step when they are switched off."""
    if causal is None or not plain or not _is_whole(causal):
        return ""
    parts = {row["part"]: row["value"] for row in causal["parts"] if row["figure"] == "step_ns"}
    if not parts:
        return ""
    return f" From the runs with switches: {_by(parts, 'ns') or 'no change'} in a step."


# Tables ---------------------------------------------------------------------------------------------


def _blocks(conditions: Sequence[Mapping[str, Any]], rows_of: Any) -> list[dict[str, Any]]:
    """Put the rows of all conditions under each other; only the first names the condition."""
    found = []
    for condition in conditions:
        label = {
            "factor": None if condition["factor"] is None else f"{condition['factor']:g}",
            "hint": dash(condition["hint"]),
            "allocator": dash(condition.get("allocator")),
        }
        for row in rows_of(condition):
            found.append({**label, **row})
            label = dict.fromkeys(label)
    return found


def _ratio_rows(pair: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in pair["ratios"]:
        yield {
            "figure": _FIGURES[row["figure"]],
            "off": _amount(row["off"], row["unit"]),
            "on": _amount(row["on"], row["unit"]),
            "ratio": _number(row["ratio"]),
            "interval": _interval(row),
        }


def _interval(row: Row) -> str:
    low, high = row["ratio_low"], row["ratio_high"]
    if low is None:
        return "-"
    return f"{_number(low)} to {_number(high)}" if high is not None else f"from {_number(low)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value >= 10 else f"{value:.3f}"


def _part_rows(pair: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found = {(row["figure"], row["part"]): row for row in pair["decomposition"]}
    for figure in dict.fromkeys(key for key, _ in found):
        yield {
            "figure": _FIGURES[figure],
            "difference": _signed(**_of(found[figure, "difference"])),
            **{part: _with_error(found[figure, part]) for part in _PARTS},
        }


def _of(row: Row) -> dict[str, Any]:
    return {"value": row["value"], "unit": row["unit"]}


def _with_error(row: Row) -> str:
    """Write a part with its error; ``to 0`` where it is only an upper bound."""
    if row["value"] is None:
        return "-"
    text = _signed(**_of(row))
    if row["value"] == 0 and not row["systematic_error"] and not row["statistical_error"]:
        return text
    if row["bound"] == "upper" and row["value"] != 0:
        return f"{text} to 0"
    if row["error"] is None:
        return text
    return f"{text} ± {_amount(row['error'], row['unit'])}"


def _causal_rows(causal: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found = {(row["figure"], row["part"]): row for row in causal["parts"]}
    for figure in dict.fromkeys(key for key, _ in found):
        yield {
            "figure": _FIGURES[figure],
            **{part: _with_spread(found.get((figure, part))) for part in ("difference", *_PARTS)},
        }


def _with_spread(row: Row | None) -> str:
    if row is None or row["value"] is None:
        return "-"
    text = _signed(row["value"], row["unit"])
    if row["low"] is None or row["low"] == row["high"]:
        return text
    return f"{text} ({_signed(row['low'], row['unit'])} to {_signed(row['high'], row['unit'])})"


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "ns":
        return format_time(value)
    return format_bytes(value) if unit == "byte" else format_count(round(value))


def _signed(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{'+' * (value > 0)}{_amount(value, unit)}"


def _told_apart(
    fields: Sequence[Field], conditions: Sequence[Mapping[str, Any]]
) -> tuple[Field, ...]:
    """Leave out the conditions in which no two differ."""
    named = ("factor", "hint", "allocator")
    same = {key for key in named if len({each.get(key) for each in conditions}) == 1}
    return tuple(field for field in fields if field.key not in same)


# Notes ----------------------------------------------------------------------------------------------


_PART_NOTE: Final = """\
Parts and remainder add up to the difference. `to 0`: an upper bound. ±: how much may carry the mark of
another mechanism, and how much steps differ. This is an account of rows, bytes and time as they were, not
of what a mechanism causes: dead memory that pushes living memory out, or packing that changes the number of
fault rows, carries no mark and is in the remainder (other)."""


def _ratio_head(pairs: Sequence[Mapping[str, Any]]) -> str:
    if any(pair["allocator"] == "raw" for pair in pairs):
        return "Mean of a warm step of both sides (off and on)"
    return "Mean of a warm step without (off) and with (on) the caching allocator"


def _ratio_note(pairs: Sequence[Mapping[str, Any]]) -> str:
    """Say what an interval is worth."""
    rows = [row for pair in pairs for row in pair["ratios"]]
    fewest = min(min(row["n_off_steps"], row["n_on_steps"]) for row in rows)
    if fewest == 1:
        return "One warm step has no interval and no error: record more steps."
    if any(row["ratio_low"] is not None for row in rows):
        few = "; of so few steps they are too narrow" * (fewest < _FEW_STEPS)
        return f"Intervals: from {fewest} or more warm steps a side, drawn again and again{few}."
    return ""


def _is_whole(causal: Mapping[str, Any]) -> bool:
    """Say whether there is a run for each combination of switches."""
    return all(row["method"] != "without it" for row in causal["parts"])


def _causal_head(causal: Sequence[Mapping[str, Any]]) -> str:
    if all(map(_is_whole, causal)):
        return "The difference by mechanism, from runs with each of them switched off"
    return "What each mechanism adds to the others: the caching allocator less a run without it"


def _causal_note(causal: Sequence[Mapping[str, Any]]) -> str:
    if all(map(_is_whole, causal)):
        said = (
            "Shapley values: the mean of what a mechanism adds over all orders of adding them, with the least\n"
            "and the most. Remainder: what the cache costs with all three switched off.\n"
            f"{_DIFFER}\n{_NO_ERROR}"
        )
    else:
        said = (
            "These do not add up: that needs a run for each of the eight combinations of switches.\n"
            f"{_DIFFER}\n{_NO_ERROR}"
        )
    return said + _padding(causal)


_DIFFER: Final = """\
Why these differ from the account above: it books each row under the mark that the row carries, and a switch
changes which rows there are. A dead page that is dropped, for instance, faults all the same: first touch."""

_NO_ERROR: Final = "These parts are of the mean warm step of each run, and carry no error of steps."


def _padding(causal: Sequence[Mapping[str, Any]]) -> str:
    """Say that packing holds the padding of its switch, with the memory that it takes."""
    said = []
    for each in causal:
        known = each["managed_bytes"]
        packed, apart = known.get("caching"), known.get("caching:apart")
        if packed and apart and packed != apart:
            said.append(f"{format_bytes(apart)} instead of {format_bytes(packed)}")
    if not said:
        return ""
    return (
        f"\n`apart` gives every tensor VA blocks of its own, which takes more managed memory on the same GPU\n"
        f"({'; '.join(dict.fromkeys(said))}): packing here is sharing and the lack of this padding."
    )


def _kinds(document: Mapping[str, Any]) -> str:
    if document["kinds"]["pairs"] == "modelled":
        return "Every figure is the model's."
    return "Off and on are derived from recorded rows; parts and errors are reconstructed."
