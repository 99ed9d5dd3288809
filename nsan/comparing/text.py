"""A comparison for people: what the programs do differently, what moved, what did not, and what is not known.

Made from the JSON document alone, so that terminal, Markdown and report say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, log
from typing import Any, Final

from nsan.analysis.compare.tables import BASE
from nsan.comparing.writing import change_text, difference_text, interval_text, written
from nsan.tabular.notes import few
from nsan.tabular.text import Field, Row, name, table
from nsan.text import shortened
from nsan.units import counted

MOST_ROWS: Final = 30
MOST_DIFFERENCES: Final = 12
_LONGEST_PLACE: Final = 44
_CONFIDENCE: Final = "{:.3g} % interval"
_SURE: Final = ("more", "less")


# What people are shown ------------------------------------------------------------------------------


def conditions_in_words(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Say what each condition is.

    Parameters
    ----------
    document : mapping
        Of :meth:`nsan.comparing.document.Comparison.to_dict`.

    Returns
    -------
    list of (str, str, str)
        Label, sentence, kind of its figures.
    """
    found = []
    for each in document["conditions"]:
        runs = each["runs"]
        gpus = dict.fromkeys(shortened(gpu, 40) for run in runs for gpu in run["gpus"] if gpu)
        steps = sorted({run["n_steps"] for run in runs if run["n_steps"] is not None})
        parts = [shortened(each["name"], 60)]
        parts += [counted(len(runs), "run")] * (len(runs) > 1)
        parts += [few(gpus, 3)] * bool(gpus)
        if steps:
            parts.append(counted(steps[-1], "step") if len(steps) == 1 else _span(steps))
        kinds = dict.fromkeys(run["kind"] for run in runs)
        found.append((each["label"], ", ".join(parts), " and ".join(kinds)))
    return found


def _span(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]} steps"


def labels_of(document: Mapping[str, Any]) -> list[str]:
    """List the conditions that are compared with the base."""
    return [each["label"] for each in document["conditions"] if each["label"] != BASE]


def headline(document: Mapping[str, Any], label: str) -> str:
    """Say in a sentence what became of the time, and how many figures moved.

    Parameters
    ----------
    document : mapping
        The comparison.
    label : str
        The condition that is compared with the base.

    Returns
    -------
    str
        Plain text.
    """
    rows = _rows(document, label)
    return " ".join(filter(None, (_of_time(rows, label), _tally(rows))))


def _of_time(rows: Sequence[Row], label: str) -> str:
    """Say what became of the time of a step and of the run: a range of steps may enclose little of it."""
    said = [
        f"{what} takes {_time_said(row, label)}."
        for figure, what in (("step.time_ns", "A warm step"), ("duration_ns", "The run"))
        for row in rows
        if row["figure"] == figure and row["difference"] is not None
    ]
    return " ".join(said)


def _time_said(row: Row, label: str) -> str:
    base, other = (written(row[side], "ns") for side in ("base", "other"))
    both = f"{other} in {label}, {base} in {BASE}"
    change = change_text(row["change"], row["difference"])
    change += " as long" * change.endswith("times")
    word = {
        "more": change,
        "less": change,
        "same": "the same",
        "unclear": f"{change}, which may be noise",
        "unjudged": change,
    }[row["verdict"]]
    return f"{both}: {word}"


def _tally(rows: Sequence[Row]) -> str:
    """Count figures by verdict."""
    words = {
        "more": "more",
        "less": "less",
        "same": "the same",
        "unclear": "unclear",
        "unjudged": "without a verdict",
        "unknown": "not known",
    }
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in words}
    if counts["unjudged"] and counts["unjudged"] + counts["unknown"] == len(rows):
        return "No figure has a verdict."
    told = [f"{n} {words[verdict]}" for verdict, n in counts.items() if n]
    return f"Of {counted(len(rows), 'figure')}: {', '.join(told)}." if rows else ""


def mover_fields(document: Mapping[str, Any], label: str) -> tuple[Field, ...]:
    """Say how people see the rows of :func:`mover_rows`.

    Parameters
    ----------
    document : mapping
        The comparison.
    label : str
        The condition that is compared with the base.

    Returns
    -------
    tuple of Field
        Columns; without those that say nothing here.
    """
    rows = [row for row in _rows(document, label) if _is_told(row)]
    confidence = _CONFIDENCE.format(100 * document["options"]["confidence"])
    fields = (
        Field("figure", "Figure", str, right=False),
        Field("place", "Of", str, right=False),
        Field("base", BASE, str),
        Field("other", label, str),
        Field("difference", f"{label} - {BASE}", str),
        Field("change", "Change", str),
        Field("interval", confidence, str),
        Field("noise", "Noise from", str, right=False),
        Field("verdict", "Verdict", str, right=False),
    )
    hidden = set() if any(row["place"] for row in rows) else {"place"}
    hidden |= {"noise"} if len({_noise(row) for row in rows}) == 1 else set()
    if all(row["noise"] == "none" for row in rows):
        hidden |= {"interval"}
    if all(row["verdict"] == "unjudged" for row in rows):
        hidden |= {"interval", "verdict"}
    return tuple(field for field in fields if field.key not in hidden)


def mover_rows(document: Mapping[str, Any], label: str) -> list[dict[str, str]]:
    """Give the figures that moved or may have, for people: those beyond noise first, the largest effect on top.

    Parameters
    ----------
    document : mapping
        The comparison.
    label : str
        The condition that is compared with the base.

    Returns
    -------
    list of dict
        Cells by the keys of :func:`mover_fields`.
    """
    rows = [row for row in _rows(document, label) if _is_told(row)]
    rows.sort(key=lambda row: (_rank(row), -_effect(row), row["figure"], row["place"]))
    return [_cells(row) for row in rows]


def _rows(document: Mapping[str, Any], label: str) -> list[Row]:
    return [row for row in document["movers"] if row["condition"] == label]


def _is_told(row: Row) -> bool:
    """Say whether a figure has a line of its own: it is known, and not plainly the same."""
    return row["difference"] is not None and row["verdict"] != "same" and row["difference"] != 0


def _rank(row: Row) -> int:
    return 0 if row["verdict"] in _SURE else 1 if row["verdict"] == "unjudged" else 2


def _effect(row: Row) -> float:
    """Say how large a change is, either way alike: from 0 or to 0 is the largest."""
    base, other = row["base"], row["other"]
    return abs(log(other / base)) if base > 0 and other > 0 else inf


def _noise(row: Row) -> str:
    """Say what noise is known from."""
    n_base, n_other = row["n_base"], row["n_other"]
    return "-" if row["noise"] == "none" else f"{n_base} and {n_other} {row['noise']}"


_VERDICTS: Final = {"unjudged": "no verdict"}


def _cells(row: Row) -> dict[str, str]:
    unit = row["unit"]
    high = inf if row["change_high"] is None else row["change_high"]  # JSON knows no infinity
    return {
        "figure": row["figure"],
        "place": shortened(row["place"], _LONGEST_PLACE),
        "base": written(row["base"], unit),
        "other": written(row["other"], unit),
        "difference": difference_text(row["difference"], unit),
        "change": change_text(row["change"], row["difference"]),
        "interval": interval_text(row["change_low"], high),
        "noise": _noise(row),
        "verdict": _VERDICTS.get(row["verdict"], row["verdict"]),
    }


# What is said beside --------------------------------------------------------------------------------


def remarks(document: Mapping[str, Any], label: str) -> Iterator[str]:
    """Say what has no line of its own, and what verdicts stand on.

    Parameters
    ----------
    document : mapping
        The comparison.
    label : str
        The condition that is compared with the base.

    Yields
    ------
    str
        Plain text, a paragraph each.
    """
    rows = _rows(document, label)
    yield from _left_out(document)
    same = [row for row in rows if row["difference"] is not None and not _is_told(row)]
    zero = [row for row in same if row["base"] == row["other"] == 0]
    rest = [row for row in same if row not in zero]
    if rest:
        yield f"Unchanged: {_figures(rest, rows)}."
    if zero:
        yield f"0 in both: {_figures(zero, rows)}."
    yield from _not_known(document, rows)
    yield from _why_unjudged(rows)
    if any(row["verdict"] in {*_SURE, "same", "unclear"} for row in rows):
        yield _what_verdicts_mean(document, rows)
    yield from _kinds(rows)


def _figures(rows: Iterable[Row], whole: Iterable[Row]) -> str:
    """Name figures, each once; of how many places, where that is not all there are."""
    mine, in_all = (Counter(row["figure"] for row in each) for each in (rows, whole))
    return few(
        [
            name if n == in_all[name] else f"{name} ({n} of {in_all[name]})"
            for name, n in mine.items()
        ],
        40,
    )


def _left_out(document: Mapping[str, Any]) -> Iterator[str]:
    """Say which places have no row."""
    most = document["options"]["most_places"]
    for scope, n in document["places"].items():
        if n > most:
            what = counted(n, {"range": "NVTX range"}.get(scope, scope))
            yield f"Of {what} the {most} with most time are compared, and those that a limit names; a limit without @NAME sees all."


def _not_known(document: Mapping[str, Any], rows: Iterable[Row]) -> Iterator[str]:
    """Name what is not known, put together by what would record it."""
    whole, by_way = list(rows), dict[str, list[Row]]()
    rows = whole
    steps = [row for row in rows if row["scope"] == "step"]
    if steps and all(row["verdict"] == "unknown" for row in steps):
        yield f"No steps are compared. {_NOT_FOUND['step']}"
        rows = [row for row in rows if row["scope"] != "step"]
    for row in rows:
        if row["verdict"] == "unknown":
            way = document["record"].get(row["figure"], _NOT_FOUND.get(row["scope"], ""))
            by_way.setdefault(way, []).append(row)
    for way, unknown in by_way.items():
        yield f"Not known: {_figures(unknown, whole)}. {way}".rstrip()


_NOT_FOUND: Final = {
    "step": (
        'Not each run has warm steps: mark steps with `nvtxRangePush("step")` (in Python '
        "`torch.cuda.nvtx.range('step')`), or name their range with --nvtx."
    ),
    "run": "The capture does not tell.",
}


def _why_unjudged(rows: Sequence[Row]) -> Iterator[str]:
    """Say why figures have no verdict."""
    by_reason: dict[str, list[Row]] = {}
    for row in rows:
        if row["verdict"] == "unjudged":
            by_reason.setdefault(row["reason"], []).append(row)
    for reason, unjudged in by_reason.items():
        which = (
            f" ({_figures(unjudged, rows)})" if len(by_reason) > 1 and len(unjudged) <= 8 else ""
        )
        text = reason[0].upper() + reason[1:]
        yield f"Without a verdict{which}: {text.rstrip('.')}."


def _what_verdicts_mean(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    options = document["options"]
    least = f"{100 * options['min_effect']:.3g} %"
    said = (
        f"More and less: a change of at least {least} beyond noise, with at most "
        f"{100 * (1 - options['confidence']):.3g} % chance that noise alone moves any of these figures (Holm). Same: "
        f"surely within {least}. Unclear: neither."
    )
    judged = [row for row in rows if row["verdict"] in {*_SURE, "same", "unclear"}]
    told = dict.fromkeys(_noise(row) for row in judged)
    said += f" Noise: from {', '.join(told)}."
    if any(row["noise"] == "steps" for row in judged):
        said += (
            " Steps of one run say how much steps differ, not how much another run would. They count for as many "
            "values as they are worth, as each is like the one before."
        )
    return said


def _kinds(rows: Sequence[Row]) -> Iterator[str]:
    """Say of which kind the figures are."""
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        if row["base"] is not None or row["other"] is not None:
            by_kind.setdefault(row["kind"], []).append(row)
    if set(by_kind) == {"modelled"}:
        yield "Every figure is the model's."
        return
    parts = [
        f"{kind}: {_figures(found, rows)}" for kind, found in by_kind.items() if kind != "recorded"
    ]
    if parts:
        yield f"Figures are recorded, but {'; '.join(parts)}."


def warnings_of(document: Mapping[str, Any]) -> list[str]:
    """List what makes the comparison doubtful."""
    return [each["text"] for each in document["comparable"]]


def differences_of(document: Mapping[str, Any], label: str) -> list[str]:
    """List what the programs do differently; what is said by a call is not said again."""
    mine = [each for each in document["differs"] if each["condition"] == label]
    calls = {(tuple(each["base"]), tuple(each["other"])) for each in mine if each["what"] == "call"}
    return [
        each["text"]
        for each in mine
        if each["what"] != "managed_allocations"
        or (tuple(each["base"]), tuple(each["other"])) not in calls
    ]


def gates_in_words(document: Mapping[str, Any]) -> list[str]:
    """Say what became of each gate."""
    several = len(labels_of(document)) > 1
    return [
        f"{_OUTCOMES[each['outcome']]} {shortened(each['gate'], 80)}"
        f"{' (' + each['condition'] + ')' if several else ''}: {each['text']}"
        for each in document["gates"]
    ]


_OUTCOMES: Final = {"passed": "PASSED", "failed": "FAILED", "undecided": "UNDECIDED"}


# Terminal and Markdown ------------------------------------------------------------------------------


def text_of(document: Mapping[str, Any], *, markdown: bool = False, rows: int | None = None) -> str:
    """Write a comparison for people.

    Parameters
    ----------
    document : mapping
        What JSON holds.
    markdown : bool, default False
        As Markdown.
    rows : int, optional
        Lines of a table at most, 30 by default.

    Returns
    -------
    str
        Conditions, doubts, differences of the programs, movers, gates.
    """
    bullet = "- " * markdown

    def lines(texts: Iterable[str], mark: str = "- ") -> str:
        return "\n".join(mark + name(each, markdown=markdown) for each in texts)

    parts = [
        lines(map(_condition, conditions_in_words(document)), bullet),
        lines((f"Beware: {each}" for each in warnings_of(document)), bullet),
    ]
    for label in labels_of(document):
        parts += _of_pair(document, label, (markdown, rows or MOST_ROWS), lines)
    if document["gates"]:
        parts += [f"{'## ' * markdown}Gates", lines(gates_in_words(document), bullet)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _condition(said: tuple[str, str, str]) -> str:
    label, what, kind = said
    return f"{label}: {what}" + (f" ({kind})" if kind != "recorded" else "")


def _of_pair(
    document: Mapping[str, Any], label: str, how: tuple[bool, int], lines: Any
) -> Iterator[str]:
    """Write what is said of one condition against the base."""
    markdown, most = how
    differs, rows = differences_of(document, label), mover_rows(document, label)
    yield f"{'## ' * markdown}{label} against {BASE}"
    yield name(headline(document, label), markdown=markdown)
    if differs:
        yield "What the programs do differently:"
        yield lines(differs[:MOST_DIFFERENCES])
    if len(differs) > MOST_DIFFERENCES:
        yield f"({len(differs) - MOST_DIFFERENCES} more differences: --json)"
    if not differs:
        yield "The programs have the same calls, kernels, NVTX ranges and allocations, as far as is recorded."
    if rows:
        yield table(rows[:most], mover_fields(document, label), markdown=markdown)
    if len(rows) > most:
        yield f"({len(rows) - most} more rows: --rows N)"
    for each in remarks(document, label):
        yield name(each, markdown=markdown)
