"""What table 1 shows, in sentences that follow from its rows."""

from __future__ import annotations

from statistics import mean

from benchmarks.papers.markdown import listed, mib, ratio, spread
from benchmarks.papers.signs import (
    factors_text,
    fault_rows,
    sign,
    time,
    told,
    traffic,
    two_sided,
    up_to,
)
from nsan.analysis.pca.decomposition import MECHANISMS

MODERATE = (1.25, 1.5)
"""What counts as moderate here: more than fits, by a half at most; at 1 the tensors fit. The paper's own
factors are not known."""

_WORDS = {
    "reuse": "reuse",
    "dead": "dead traffic",
    "packing": "packing",
    "remainder": "the rest",
}
FIGURES = {
    "fault_rows": "the number of fault rows",
    "in_bytes": "what comes in",
    "out_bytes": "what goes out",
    "step_ns": "step time",
}
CLOSE = 0.1
"""Parts that differ by less than this share do equally much: they have no error that would tell."""

_TOGETHER = {
    "yes": "Fewer faults, more traffic and faster together",
    "no": "Not all three together",
    "tie": "Undecided, as one of the three is a tie",
}
_COUNTED = {"yes": "in", "no": "not in", "tie": "undecided by a tie in", "unknown": "unknown in"}
_NOT_KNOWN = "Not known from these runs."


def is_moderate(row):
    """Say whether the factor of a row is moderate: beyond what fits, up to the highest of MODERATE."""
    return row["factor"] is not None and 1 < row["factor"] <= max(MODERATE)


def verdict(name, rows, parts=()):
    """Say in words what PCA does to one program, from its rows."""
    own = [row for row in rows if row["name"] == name]
    said = [
        f"**{name}**. Fault rows: {told(own, fault_rows, 'fewer', 'more', 'as many')}.",
        f"Traffic: {told(own, traffic, 'less', 'more', 'as much')}.",
        f"Time: {told(own, time, 'faster', 'slower', 'as fast')}{_unbroken(own)}.",
    ]
    moderate = [row for row in own if is_moderate(row)]
    for way, what in _TOGETHER.items():
        if at := [row["factor"] for row in moderate if two_sided(row) == way]:
            said.append(f"{what}: at {factors_text(at)}.")
    return " ".join([*said, *mechanism_sentences(name, own, parts)])


def _unbroken(rows):
    """Say up to which factor all steps are faster, where the factors are known."""
    if any(row["factor"] is None for row in rows):
        return ""
    last = up_to(rows)
    if last is None:
        return "; not faster even at the lowest factor"
    return f"; faster without a break up to factor {last:g}"


def fits_sentence(rows):
    """Say what modelled runs move without PCA though their tensors fit, and what that stands on."""
    moved = [row for row in rows if row["factor"] is not None and row["factor"] <= 1]
    told = [
        f"{row['name']} at {row['factor']:g} ({mib(row['in_bytes_off'])} MiB in)"
        for row in moved
        if row["in_bytes_off"]
    ]
    if not told:
        return ""
    return (
        f"Without PCA bytes come in even where the tensors fit: {listed(told)}. The model backs each block "
        "of 2 MiB with a whole chunk of the GPU's memory, so that a tensor of 2.25 MiB takes 4 MiB; "
        "that is assumed, and a driver with smaller chunks would do better without PCA than these rows."
    )


def mechanism_sentences(name, rows, parts):
    """Say for each figure which mechanism does most of what PCA does, from the causal parts."""
    said = []
    for figure, what in FIGURES.items():
        by_cause = {}
        for factor, cause in _causes(rows, [row for row in parts if row["name"] == name], figure):
            by_cause.setdefault(cause, []).append(factor)
        said += [f"{what} {cause} at {factors_text(at)}" for cause, at in by_cause.items()]
    return [f"By mechanism: {'; '.join(said)}."] if said else []


def _causes(rows, parts, figure):
    """Say for each program and factor which mechanism does most: (factor, words)."""
    split = {}
    for part in parts:
        if part["figure"] == figure:
            split.setdefault((part["name"], part["factor"]), {})[part["part"]] = part
    ways = {(row["name"], row["factor"]): sign(row, figure).way for row in rows}
    causes = [
        (key[1], "is a tie" if ways.get(key) == "tie" else strongest(values))
        for key, values in split.items()
    ]
    return [(factor, cause) for factor, cause in causes if cause]


def strongest(parts):
    """Say which way a figure goes, which part does most of it and which work against it; empty: no way.

    ``parts`` are rows of causal parts by their name. Parts that are nearly as large as the largest are
    named with it. Against it work those that are more than a tenth of the largest. What does most may do
    the opposite in some order of switching on, which is said.
    """
    difference = _value(parts, "difference")
    if not difference:
        return ""
    known = {part: _value(parts, part) for part in (*MECHANISMS, "remainder")}
    least = max(map(abs, known.values())) / 10
    same = {part: value for part, value in known.items() if value * difference > 0}
    against = [
        _WORDS[part]
        for part, value in known.items()
        if value * difference < 0 and abs(value) > least
    ]
    way = "rises" if difference > 0 else "falls"
    if same:
        largest = max(map(abs, same.values()))
        most = [part for part, value in same.items() if abs(value) >= (1 - CLOSE) * largest]
        way += f" most by {listed(_WORDS[part] + _in_some_orders(parts[part]) for part in most)}"
    return f"{way} (against {listed(against)})" if against else way


def _value(parts, name):
    return (parts[name]["value"] if name in parts else None) or 0


def _in_some_orders(part):
    """Say so if a mechanism does the opposite of its mean in some order."""
    low, high = part["low"], part["high"]
    return " (not in every order)" if low is not None and low < 0 < high else ""


def counted_causes(rows, parts, figure):
    """Count over programs and factors which part does most of what happens to a figure."""
    causes = [cause for _, cause in _causes(rows, parts, figure)]
    counts = [f"{cause} in {causes.count(cause)}" for cause in dict.fromkeys(causes)]
    if not counts:
        return ""
    return f"By the model's switches {FIGURES[figure]} {listed(counts)} of {len(causes)}."


def found(rows, parts=()):
    """Answer each claim of paper 1 from the rows."""
    moderate = [row for row in rows if is_moderate(row)]
    moving = [row for row in rows if traffic(row).way != "none"]
    answers = {
        "faults": _judged(rows, fault_rows, ("fewer fault rows", "more"), "less", "rows"),
        "traffic": _judged(moving, traffic, ("less", "more bytes"), "more", "rows that move bytes"),
        "moderate": _judged(moderate, time, ("faster", "slower"), "less", "moderate rows"),
    }
    whys = {
        "faults": (_spread_sentence(rows, "fault_rows"), "fault_rows"),
        "traffic": (_dead_sentence(moving), "in_bytes"),
        "moderate": (f"{_spread_sentence(moderate, 'step_ns')} {_slower(moderate)}", "step_ns"),
    }
    for key, (why, figure) in whys.items():
        if answers[key] != _NOT_KNOWN:
            words = (answers[key], why.strip(), counted_causes(rows, parts, figure))
            answers[key] = " ".join(filter(None, words))
    if answers["moderate"] != _NOT_KNOWN:
        answers["moderate"] += _together(moderate)
    return answers


def _judged(rows, of, words, wanted, where):
    """Count in how many rows a figure goes as is claimed, against it, or neither."""
    known = [of(row) for row in rows if of(row).way != "unknown"]
    if not known:
        return _NOT_KNOWN
    ways = [each.way for each in known]
    agrees = ways.count(wanted)
    against = ways.count({"less": "more", "more": "less"}[wanted])
    word = (
        "Agrees" if agrees == len(known)
        else "Agrees in part" if agrees
        else "Differs" if against
        else "Undecided"
    )  # fmt: skip
    ties = [f"a tie in {ways.count('tie')}"] if "tie" in ways else []
    less, more = (f"{words[i]} in {ways.count(way)}" for i, way in enumerate(("less", "more")))
    bare = sum(each.is_bare for each in known)
    told_bare = f" Without an interval, the bare sign: {bare} of them." if bare else ""
    return f"{word}: {', '.join([less, more, *ties])} of {len(known)} {where}.{told_bare}"


def _together(rows):
    """Count in how many rows all three parts of the claim hold."""
    ways = [two_sided(row) for row in rows]
    counts = [f"{what} {ways.count(way)}" for way, what in _COUNTED.items() if way in ways]
    return f" Fewer faults, more traffic and faster together, of {len(ways)}: {listed(counts)}."


def _spread_sentence(rows, figure):
    """Name the least and the largest ratio of a figure."""
    known = [row for row in rows if row[f"{figure}_ratio"] is not None]
    if not known:
        return ""
    ends = (pick(known, key=lambda row: row[f"{figure}_ratio"]) for pick in (min, max))
    said = [
        f"{ratio(row[f'{figure}_ratio'])} ({row['name']} at {factors_text([row['factor']])})"
        for row in ends
    ]
    return f"Ratio {said[0]}." if said[0] == said[1] else f"Ratios {said[0]} to {said[1]}."


def _slower(rows):
    """Say what else is worse in the rows that are slower."""
    worse = [row for row in rows if time(row).way == "more"]
    if not worse:
        return ""
    n_more = sum(traffic(row).way == "more" for row in worse)
    n_fewer = sum(fault_rows(row).way == "less" for row in worse)
    return (
        f"Slower: {len(worse)}; with more bytes {n_more} of them, with fewer fault rows {n_fewer}."
    )


def _dead_sentence(rows):
    """Say how much of the additional traffic is dead."""
    more = [
        row
        for row in rows
        if traffic(row).way == "more" and None not in (row["dead_in_bytes"], row["dead_out_bytes"])
    ]
    if not more:
        return ""
    shares = [
        (row["dead_in_bytes"] + row["dead_out_bytes"])
        / (row["moved_bytes_on"] - row["moved_bytes_off"])
        for row in more
    ]
    told_spread = spread(shares, ratio)
    average = f" (mean {ratio(mean(shares))})" if told_spread != ratio(shares[0]) else ""
    return (
        f"Where there are more, dead bytes are {told_spread} times the additional bytes{average}."
    )
