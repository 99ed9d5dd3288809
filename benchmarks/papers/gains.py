"""What table 2 shows: its text, and the claims of paper 2 and PASTA judged by its rows."""

from __future__ import annotations

import itertools

from benchmarks.papers.claims import claim, claims_table
from benchmarks.papers.markdown import (
    Column,
    listed,
    mib,
    ms,
    number,
    percent,
    points,
    ratio,
    table,
)
from benchmarks.papers.runs import TREND, WARMUP, change_text
from nsan.model.hints import LEAST_BYTES

SHARE = 0.8
"""Of the bytes that came in: so much the chosen tensors cover."""

TOP = 5
THREE = 3.0


def text(rows, profiles):
    """Write table 2 and what follows from it."""
    lines = [
        "## Table 2a. Tensors chosen from a profile of the run without hints: modelled",
        table(profiles, _PROFILE),
        f"Profile: bytes that came in for each tensor in warm steps, without dead ones. Rule: tensors of "
        f"{LEAST_BYTES >> 20} MiB and more, most bytes in per byte of the tensor first, until they cover "
        f"{percent(SHARE)} of these bytes.",
        "## Table 2b. Prefetch and advice against the factor, with PCA: modelled",
        table(rows, _ROWS),
        "Gain: time without hints over time with them, less 1, in per cent; warm: all steps but the "
        f"first {WARMUP}; all: the cold ones too. Without the driver's prefetcher: as in the figures of "
        "PASTA (its scripts turn it off). Memory that advice leaves at the CPU is used in place over the "
        "link, at the rate of copies beside them: assumed by the model, no capture shows it.",
        *_trends(rows),
        *(verdict(name, rows) for name in dict.fromkeys(row["name"] for row in rows)),
        "### Paper 2, PASTA and these tables",
        claims_table(2, found(rows)),
    ]
    return "\n\n".join(lines) + "\n"


def _trends(rows):
    """Name the runs whose warm steps still trend in time."""
    found = [
        f"{row['name']} at {row['factor']:g}, {row['hint']}"
        f"{', no prefetcher' * (not row['prefetcher'])} ({change_text(row['trend'])})"
        for row in rows
        if row["trend"] is not None
    ]
    if not found:
        return []
    return [
        f"Warm steps still trend, the first more than {100 * TREND:.0f} % from the mean of the later ones in "
        f"time: {'; '.join(found)}."
    ]


_PROFILE = (
    Column("name", "Network"),
    Column("factor", "Factor", number),
    Column("n_tensors", "Tensors with bytes in", number, "modelled"),
    Column("in_bytes", "Bytes in, MiB", mib, "modelled"),
    Column("n_chosen", "Chosen", number, "modelled"),
    Column("chosen_bytes", "Their size, MiB", mib, "modelled"),
    Column("covered_fraction", "Of the bytes in", percent, "modelled"),
    Column("top", f"First {TOP} (bytes in per byte)", str, "modelled"),
)
_ROWS = (
    Column("name", "Network"),
    Column("prefetcher", "Driver's prefetcher", lambda on: "on" if on else "off"),
    Column("factor", "Factor", number),
    Column("hint", "Hint"),
    Column("n_tensors", "Tensors named", number),
    Column("warm_ns", "Warm step, ms", ms, "modelled"),
    Column("warm_gain", "Gain, %", points, "modelled"),
    Column("all_ns", "All steps, ms", ms, "modelled"),
    Column("all_gain", "Gain, %", points, "modelled"),
    Column("in_bytes", "In, all steps, MiB", mib, "modelled"),
)


def picked(rows, hint, *, prefetcher=True, name=None):
    """Take the rows of one hint, by factor."""
    return sorted(
        (
            row
            for row in rows
            if row["hint"] == hint
            and row["prefetcher"] == prefetcher
            and name in {None, row["name"]}
        ),
        key=lambda row: row["factor"],
    )


def verdict(name, rows):
    """Say in words what hints do to one network."""
    own = [row for row in rows if row["name"] == name and row["prefetcher"]]
    said = []
    for factor in sorted({row["factor"] for row in own}):
        here = [row for row in own if row["factor"] == factor and row["hint"] != "none"]
        if not here:
            continue
        best = max(here, key=lambda row: row["warm_gain"])
        worst = min(here, key=lambda row: row["warm_gain"])
        said.append(
            f"at {factor:g} {_best(best)}, worst is {worst['hint']} ({points(worst['warm_gain'])} %)"
        )
    return (
        f"**{name}**, warm steps: {'; '.join(said)}." if said else f"**{name}**: no hint was tried."
    )


def _best(row):
    if row["warm_gain"] <= 0:
        return f"no hint gains ({row['hint']} {points(row['warm_gain'])} %)"
    return f"best is {row['hint']} ({points(row['warm_gain'])} %)"


def best_by_factor(rows, name):
    """Give the best gain of any hint at each factor above 1, lowest factor first."""
    best = {}
    for row in rows:
        if (
            row["name"] == name
            and row["prefetcher"]
            and row["factor"] > 1
            and row["hint"] != "none"
        ):
            best[row["factor"]] = max(best.get(row["factor"], row["warm_gain"]), row["warm_gain"])
    return sorted(best.items())


def trend(pairs):
    """Say how gains go with the factor: falls, rises, or neither; None with fewer than two."""
    gains = [gain for _, gain in pairs]
    if len(gains) < 2:
        return None
    steps = [after - before for before, after in itertools.pairwise(gains)]
    if all(step <= 0 for step in steps) and gains[-1] < gains[0]:
        return "falls"
    if all(step >= 0 for step in steps) and gains[-1] > gains[0]:
        return "rises"
    return "neither falls nor rises all along"


def found(rows):
    """Answer each claim of paper 2 and PASTA from the rows."""
    return {
        "lower": _lower(rows),
        "too_many": _too_many(rows),
        "object_fits": _fits(rows, "object_fits", "prefetch objects, all"),
        "tensor_fits": _fits(rows, "tensor_fits", "prefetch all"),
        "object_slow": _slow(rows),
        "tensor_three": _three(rows),
    }


def _lower(rows):
    said, agree = [], []
    for name in dict.fromkeys(row["name"] for row in rows):
        for what, pairs in (
            ("best hint", best_by_factor(rows, name)),
            (
                "prefetch chosen",
                [
                    (row["factor"], row["warm_gain"])
                    for row in picked(rows, "prefetch chosen", name=name)
                    if row["factor"] > 1
                ],
            ),
        ):
            way = trend(pairs)
            if way is None:
                continue
            agree.append(pairs[0][1] > pairs[-1][1])
            gains = listed(f"{points(gain)} % at {factor:g}" for factor, gain in pairs)
            said.append(f"{name}, {what}: {gains}: it {way}.")
    if not agree:
        return "Fewer than two factors above 1 were run."
    counted = "Counted: more at the lowest factor above 1 than at the highest."
    return f"{_agreement(agree)} {counted} {' '.join(said)}"


def _agreement(flags):
    """Say in how many cases a claim holds."""
    word = "Agrees" if all(flags) else "Agrees in part" if any(flags) else "Differs"
    return f"{word}." if len(flags) == 1 else f"{word} ({sum(flags)} of {len(flags)})."


def _too_many(rows):
    everything = picked(rows, "prefetch all") + picked(rows, "prefetch objects, all")
    everything = [row for row in everything if row["factor"] > 1]
    if not everything:
        return "Not run above factor 1."
    chosen = {(row["name"], row["factor"]): row for row in picked(rows, "prefetch chosen")}
    loses = [row for row in everything if row["warm_gain"] < 0]
    pairs = [(row, chosen.get((row["name"], row["factor"]))) for row in everything]
    behind = [row for row, few in pairs if few and row["warm_gain"] < few["warm_gain"]]
    n_pairs = sum(few is not None for _, few in pairs)
    said = (
        f"{_agreement([bool(loses)])} Hints for all tensors or objects are slower than none in "
        f"{len(loses)} of {len(everything)} runs above factor 1, and behind the chosen tensors in "
        f"{len(behind)} of {n_pairs}."
    )
    if loses:
        worst = min(loses, key=lambda row: row["warm_gain"])
        said += (
            f" Worst: {worst['hint']} for {worst['name']} at {worst['factor']:g}, "
            f"{points(worst['warm_gain'])} %."
        )
    return said


def _fits(rows, key, hint):
    """Compare gains where all fits, with and without the driver's prefetcher."""
    said = []
    for prefetcher in (False, True):
        own = [row for row in picked(rows, hint, prefetcher=prefetcher) if row["factor"] <= 1]
        if not own:
            continue
        gains = [row["all_gain"] for row in own]
        told = listed(f"{row['name']} {points(row['all_gain'])} %" for row in own)
        warm = listed(f"{points(row['warm_gain'])} %" for row in own)
        said.append(
            f"Driver's prefetcher {'on' if prefetcher else 'off'}, all steps: {told}: "
            f"{claim(key).count(gains)}; warm steps alone: {warm}. {_how_long(rows, own, key)}"
        )
    return " ".join(said) or "Not run where all fits."


def _how_long(rows, own, key):
    """Say of how many steps a run would have the gain that is claimed: the cold steps gain most.

    How many steps the paper ran is not known, and the more there are, the less the cold ones count.
    """
    bases = {(row["name"], row["factor"], row["prefetcher"]): row for row in picked_none(rows)}
    said = []
    for row in own:
        base = bases.get((row["name"], row["factor"], row["prefetcher"]))
        steps = base and steps_for_gain(base, row, claim(key).low)
        if steps:
            said.append(f"{row['name']} of {steps:.0f} steps")
    if not said:
        return "No number of steps would give the least that is claimed."
    return f"The least that is claimed is the gain of a run: {listed(said)}."


def picked_none(rows):
    """Take the rows without hints."""
    return [row for row in rows if row["hint"] == "none"]


def steps_for_gain(base, hinted, gain):
    """Find the number of steps, the cold ones too, after which hints have gained so much; None: none.

    The cold steps are those left out of the means: (cold + n warm) / (cold' + n warm') = 1 + gain,
    solved for n.
    """
    over = base["cold_ns"] - (1 + gain) * hinted["cold_ns"]
    under = (1 + gain) * hinted["warm_ns"] - base["warm_ns"]
    if under == 0 or over / under < 0:
        return None
    return WARMUP + over / under


def _slow(rows):
    bases = {(row["name"], row["factor"], row["prefetcher"]): row for row in picked_none(rows)}
    said = []
    for prefetcher in (False, True):
        own = [
            row
            for row in picked(rows, "prefetch objects, all", prefetcher=prefetcher)
            if row["factor"] == THREE
        ]
        if not own:
            continue
        times = [1 / (1 + row["warm_gain"]) for row in own]
        told = listed(
            f"{row['name']} {ratio(slower)}{_moved(bases, row)}"
            for row, slower in zip(own, times, strict=True)
        )
        said.append(
            f"Driver's prefetcher {'on' if prefetcher else 'off'}, time of a warm step over that without "
            f"hints: {told}: {claim('object_slow').count(times)}."
        )
    return " ".join(said) or f"Factor {THREE:g} was not run."


def _moved(bases, row):
    """Say how many times the bytes come in that come in without hints."""
    base = bases.get((row["name"], row["factor"], row["prefetcher"]))
    if not base or not base["in_bytes"]:
        return ""
    return f" ({ratio(row['in_bytes'] / base['in_bytes'])} times the bytes in)"


def _three(rows):
    said = []
    for prefetcher in (False, True):
        own = [
            row
            for row in picked(rows, "prefetch all", prefetcher=prefetcher)
            if row["factor"] == THREE
        ]
        if own:
            told = listed(
                f"{row['name']} is {'faster' if row['warm_gain'] > 0 else 'not faster'} "
                f"({points(row['warm_gain'])} %)"
                for row in own
            )
            said.append(f"Driver's prefetcher {'on' if prefetcher else 'off'}: {told}.")
    return " ".join(said) or f"Factor {THREE:g} was not run."
