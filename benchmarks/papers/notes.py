"""What the figures of table 1 stand on, in sentences that follow from its rows."""

from __future__ import annotations

from benchmarks.papers.markdown import listed, mib, spread
from benchmarks.papers.runs import TREND, WARMUP
from benchmarks.papers.signs import factors_text

FEW_STEPS = 5
"""Of fewer steps an interval is too narrow."""


def note_of(rows):
    """Say how the figures of table 1 were made, and how far they can be trusted: a list of sentences."""
    counts = [count for row in rows for count in row["n_steps"]]
    few = f" (of fewer than {FEW_STEPS} steps it is too narrow)" * (min(counts) < FEW_STEPS)
    return [
        f"Means of {spread(counts, str)} warm steps a side (the first {WARMUP} of each run are left out).",
        "One fault row is one batch of the driver.",
        "Ratios: with PCA over without, in brackets the 95 % interval over the warm steps where it is "
        f"wider than the last digit{few}. A ratio whose interval holds 1 is called a tie.",
        "Dead: bytes that no tensor needed, with PCA.",
        *_factor_sentences(rows),
        *_without_steps(rows),
        *_trends(rows),
    ]


def _factor_sentences(rows):
    said = []
    if any(row["factor"] is not None for row in rows):
        said.append("Factor: peak of the live tensors over GPU memory.")
    if any(row["factor"] is None for row in rows):
        said.append(
            "Factor -: unknown. A recorded run does not say how much of the GPU's memory was free for it: a "
            "ballast or another process cannot be seen."
        )
    return said


def _where(row):
    return f"{row['name']} at {factors_text([row['factor']])}"


def _without_steps(rows):
    none = [_where(row) for row in rows if 0 in row["n_steps"]]
    if not none:
        return []
    return [f"No warm step on one side, and so no figure: {listed(none)}."]


def _trends(rows):
    """Name the runs whose warm steps still trend: their means depend on how many steps were run."""
    alone = [_where(row) for row in rows if row["n_shortest"] == 1]
    found = [
        f"{_where(row)} {side} ({figures})"
        for row in rows
        for side, figures in row["trends"].items()
    ]
    said, percent = [], f"{100 * TREND:.0f} %"
    if alone:
        said.append(
            f"A run of one warm step, so that nothing tells whether it is warm: {listed(alone)}."
        )
    if found:
        said.append(
            f"Warm steps still trend, the first more than {percent} from the mean of the later ones, so "
            f"that another number of steps would give other means: {'; '.join(found)}."
        )
    elif any(row["n_shortest"] > 1 for row in rows):
        said.append(
            f"No run still trends: the first warm step is within {percent} of the mean of the later ones."
        )
    return said


def parts_note(switched):
    """Say what the parts of the mechanisms are, and what they do not hold: a list of sentences."""
    said = [
        "Mean effect over the orders in which the three mechanisms can be switched on, in brackets the least "
        "and the most.",
        "Rest: the caching allocator with all three off, less no cache. The parts and the rest add up.",
        "Without reuse nothing stays cached, so dead traffic exists only beside it: what the two do together "
        "is shared between them.",
        f"The parts have no error of steps: each stands on means of {spread(switched.n_steps, str)} warm "
        "steps, and the brackets do not say how much these differ.",
        *_padding(switched.padding),
    ]
    if switched.trends:
        said.append(f"Of these runs still trend: {'; '.join(switched.trends)}.")
    return said


def _padding(peaks):
    """Say how much more managed memory a run without packing needs: its packing is padding too."""
    more = {name: pair for name, pair in peaks.items() if pair[1] > pair[0]}
    other = [name for name, pair in peaks.items() if pair[1] <= pair[0]]
    said = []
    if more:
        told = listed(f"{name} {mib(on)} and {mib(off)} MiB" for name, (on, off) in more.items())
        said.append(
            "With packing off (`apart`) every tensor has 2 MiB blocks of its own, which pads: the peak of "
            f"managed memory with packing and without is {told}, at equal GPU memory. The part of packing "
            "includes what this padding costs."
        )
    if other:
        said.append(f"Packing off needs no more managed memory in {listed(other)}.")
    return said
