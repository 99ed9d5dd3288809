"""What table 1 shows, in sentences that follow from its rows."""

from __future__ import annotations

from statistics import mean

from benchmarks.papers.markdown import listed, mib, ratio
from nsan.analysis.pca.decomposition import MECHANISMS

MODERATE = (1.25, 1.5)
"""What counts as moderate here: more than fits, by a half at most. The paper's own are not known."""

_WORDS = {
    "reuse": "reuse",
    "dead": "dead traffic",
    "packing": "packing",
    "remainder": "the rest",
}
_FIGURES = {
    "fault_rows": "the number of fault rows",
    "in_bytes": "what comes in",
    "out_bytes": "what goes out",
    "step_ns": "step time",
}
_CAUSED = {"faults": "fault_rows", "traffic": "in_bytes", "moderate": "step_ns"}


def _change(row, *figures):
    """Give what PCA adds to a sum of figures; None if one is not known."""
    sides = [(row[f"{figure}_on"], row[f"{figure}_off"]) for figure in figures]
    if any(value is None for pair in sides for value in pair):
        return None
    return sum(on - off for on, off in sides)


def faults(row):
    """Give how many fault rows more a step has with PCA."""
    return _change(row, "fault_rows")


def traffic(row):
    """Give how many bytes more a step moves with PCA, both ways."""
    return _change(row, "in_bytes", "out_bytes")


def time(row):
    """Give how many ns longer a step is with PCA."""
    return _change(row, "step_ns")


def signs(rows, change):
    """Sort the factors of some rows by whether a figure falls, rises or stays with PCA."""
    found = {"less": [], "more": [], "same": [], "unknown": []}
    for row in rows:
        value = change(row)
        word = (
            "unknown" if value is None
            else "less" if value < 0
            else "more" if value > 0
            else "same"
        )  # fmt: skip
        found[word].append(row["factor"])
    return found


def _told(found, less, more, same):
    """Say at which factors something falls, rises and stays."""
    words = {"less": less, "more": more, "same": same, "unknown": "unknown"}
    parts = [f"{words[key]} at {factors_text(at)}" for key, at in found.items() if at]
    return listed(parts)


def factors_text(factors):
    """Write factors as a list."""
    return listed("an unknown factor" if each is None else f"{each:g}" for each in factors)


def up_to(rows):
    """Find the factor up to which every step is faster with PCA; None: not even the lowest."""
    last = None
    for row in sorted(rows, key=lambda row: row["factor"] or 0):
        change = time(row)
        if change is None or change >= 0:
            break
        last = row["factor"]
    return last


def is_moderate(row):
    """Say whether the factor of a row is moderate: beyond what fits, up to the highest of MODERATE."""
    return row["factor"] is not None and 1 < row["factor"] <= max(MODERATE)


def two_sided(row):
    """Say whether all three parts of the claim hold in a row: fewer faults, more traffic, faster."""
    changes = (faults(row), traffic(row), time(row))
    if None in changes:
        return None
    return changes[0] < 0 < changes[1] and changes[2] < 0


def verdict(name, rows, parts=()):
    """Say in words what PCA does to one program, from its rows."""
    own = [row for row in rows if row["name"] == name]
    said = [
        f"**{name}**. Fault rows: {_told(signs(own, faults), 'fewer', 'more', 'as many')}.",
        f"Traffic: {_told(signs(own, traffic), 'less', 'more', 'as much')}.",
        f"Time: {_told(signs(own, time), 'faster', 'slower', 'as fast')}{_unbroken(own)}.",
    ]
    held = [row["factor"] for row in own if is_moderate(row) and two_sided(row)]
    failed = [row["factor"] for row in own if is_moderate(row) and two_sided(row) is False]
    if held:
        said.append(f"Fewer faults, more traffic and faster together: at {factors_text(held)}.")
    if failed:
        said.append(f"Not all three together: at {factors_text(failed)}.")
    return " ".join([*said, *mechanism_sentences(name, parts)])


def _unbroken(rows):
    """Say up to which factor all steps are faster, where the factors are known."""
    if any(row["factor"] is None for row in rows):
        return ""
    last = up_to(rows)
    way = "not faster even at the lowest factor" if last is None else f"up to factor {last:g}"
    return f"; without a break {way}"


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


def mechanism_sentences(name, parts):
    """Say for each figure which mechanism does most of what PCA does, from the causal parts."""
    said = []
    for figure, what in _FIGURES.items():
        by_cause = {}
        for factor, values in _values(parts, figure, name):
            by_cause.setdefault(strongest(values), []).append(factor)
        said += [f"{what} {cause} at {factors_text(at)}" for cause, at in by_cause.items() if cause]
    return [f"By mechanism: {'; '.join(said)}."] if said else []


def _values(parts, figure, name=None):
    """Give the parts of a figure by name and factor: (factor, value by part)."""
    found = {}
    for row in parts:
        if row["figure"] == figure and name in {None, row["name"]}:
            found.setdefault((row["name"], row["factor"]), {})[row["part"]] = row["value"]
    return [(factor, values) for (_, factor), values in found.items()]


def strongest(values):
    """Say which way a figure goes, which part does most of it and which work against it; empty: no way.

    Against it work those parts that are more than a tenth of the largest.
    """
    difference = values.get("difference")
    if not difference:
        return ""
    known = {part: values.get(part) or 0 for part in (*MECHANISMS, "remainder")}
    least = max(map(abs, known.values())) / 10
    same = {part: value for part, value in known.items() if value * difference > 0}
    against = [
        _WORDS[part]
        for part, value in known.items()
        if value * difference < 0 and abs(value) > least
    ]
    way = "rises" if difference > 0 else "falls"
    if same:
        way += f" most by {_WORDS[max(same, key=lambda part: abs(same[part]))]}"
    return f"{way} (against {listed(against)})" if against else way


def counted_causes(parts, figure):
    """Count over programs and factors which part does most of what happens to a figure."""
    told = [each for _, values in _values(parts, figure) if (each := strongest(values))]
    counts = [f"{cause} in {told.count(cause)}" for cause in dict.fromkeys(told)]
    if not counts:
        return ""
    return f"By the model's switches {_FIGURES[figure]} {listed(counts)} of {len(told)}."


def found(rows, parts=()):
    """Answer each claim of paper 1 from the rows."""
    moderate = [row for row in rows if is_moderate(row)]
    answers = {}
    for key, change, less, more, wanted in (
        ("faults", faults, "fewer fault rows", "more", "less"),
        ("traffic", traffic, "less", "more bytes", "more"),
        ("moderate", time, "faster", "slower", "less"),
    ):
        chosen = moderate if key == "moderate" else rows if key == "faults" else _moving(rows)
        known = [change(row) for row in chosen if change(row) is not None]
        if not known:
            answers[key] = "Not known from these runs."
            continue
        n_less, n_more = sum(value < 0 for value in known), sum(value > 0 for value in known)
        agrees = n_less if wanted == "less" else n_more
        word = "Agrees" if agrees == len(known) else "Differs" if not agrees else "Agrees in part"
        where = {"moderate": "moderate rows", "traffic": "rows that move bytes"}.get(key, "rows")
        answers[key] = (
            f"{word}: {less} in {n_less}, {more} in {n_more} of {len(known)} {where}. "
            f"{_why(key, chosen)} {counted_causes(parts, _CAUSED[key])}"
        ).strip()
    both = [two_sided(row) for row in moderate]
    if both and None not in both and "moderate" in answers:
        answers["moderate"] += (
            f" Fewer faults, more traffic and faster together in {sum(both)} of {len(both)}."
        )
    return answers


def _moving(rows):
    """Leave out the rows in which no byte moves, with PCA or without."""
    moved = ("in_bytes_off", "in_bytes_on", "out_bytes_off", "out_bytes_on")
    return [row for row in rows if any(row[name] for name in moved)]


def _why(key, rows):
    """Discuss a claim with the figures that bear on it."""
    if key == "traffic":
        return _dead_sentence(rows)
    figure = "fault_rows" if key == "faults" else "step_ns"
    known = [row for row in rows if row[f"{figure}_ratio"] is not None]
    if not known:
        return ""
    low = min(known, key=lambda row: row[f"{figure}_ratio"])
    high = max(known, key=lambda row: row[f"{figure}_ratio"])
    spread = (
        f"Ratios {ratio(low[f'{figure}_ratio'])} ({low['name']} at {factors_text([low['factor']])}) to "
        f"{ratio(high[f'{figure}_ratio'])} ({high['name']} at {factors_text([high['factor']])})."
    )
    worse = [row for row in known if row[f"{figure}_ratio"] > 1]
    if key == "moderate" and worse:
        n_more = sum((traffic(row) or 0) > 0 for row in worse)
        n_fewer = sum((faults(row) or 0) < 0 for row in worse)
        spread += (
            f" Of the {len(worse)} slower ones {n_more} move more bytes, and {n_fewer} have fewer fault "
            "rows all the same."
        )
    return spread


def _dead_sentence(rows):
    """Say how much of the additional traffic is dead."""
    more = [
        row
        for row in rows
        if (traffic(row) or 0) > 0 and None not in (row["dead_in_bytes"], row["dead_out_bytes"])
    ]
    if not more:
        return ""
    shares = [(row["dead_in_bytes"] + row["dead_out_bytes"]) / traffic(row) for row in more]
    return (
        f"Where there are more, dead bytes are {ratio(min(shares))} to {ratio(max(shares))} times the "
        f"additional bytes (mean {ratio(mean(shares))})."
    )
