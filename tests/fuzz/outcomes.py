"""What can become of an input, and the statistics of many."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

GOOD = ("right", "refused", "refused*", "read*")
"""Totals are those of plain SQL; a clear refusal; one of what plain SQL could read; read, and no other reader can."""

BAD = ("wrong", "traceback", "hang", "memory", "crash")
OUTCOMES = (*GOOD, *BAD)


@dataclass(frozen=True)
class Tried:
    """One input and what became of it."""

    kind: str
    seed: int
    outcome: str
    detail: str = ""
    what: str = ""
    """How the input was made."""
    seconds: float = 0.0
    """From its first byte being read to the answer, analyses and reports of a sample left out."""
    peak_mib: int = 0
    """The most memory that the process had, which holds polars and all of nsan already."""

    @property
    def is_bad(self):
        return self.outcome in BAD

    def line(self):
        return f"{self.kind}:{self.seed} {self.outcome} ({self.what}): {self.detail}"


@dataclass
class Statistics:
    """Counts by kind and outcome, the worst time, the worst memory, and what was bad."""

    counts: dict = field(default_factory=lambda: defaultdict(Counter))
    slowest: dict = field(default_factory=dict)
    largest: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=Counter)
    bad: list = field(default_factory=list)

    def add(self, tried):
        """Count one."""
        self.counts[tried.kind][tried.outcome] += 1
        self.seconds[tried.kind] += tried.seconds
        for worst, value in ((self.slowest, tried.seconds), (self.largest, tried.peak_mib)):
            worst[tried.kind] = max(worst.get(tried.kind, (0, 0)), (value, tried.seed))
        if tried.is_bad:
            self.bad.append(tried)

    def table(self):
        """Write the counts as a table, a line per kind."""
        heads = ["kind", "inputs", *OUTCOMES, "mean s", "worst s", "worst MiB"]
        lines = [heads]
        for kind, counts in sorted(self.counts.items()):
            n = counts.total()
            slow, large = self.slowest[kind], self.largest[kind]
            shown = [str(counts[name]) for name in OUTCOMES]
            lines.append(
                [
                    kind,
                    str(n),
                    *shown,
                    f"{self.seconds[kind] / n:.2f}",
                    f"{slow[0]:.1f} (:{slow[1]})",
                    f"{large[0]} (:{large[1]})",
                ]
            )
        n_all = [str(sum(c[name] for c in self.counts.values())) for name in OUTCOMES]
        lines.append(["all", str(sum(c.total() for c in self.counts.values())), *n_all, "", "", ""])
        widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
        aligned = [
            "  ".join(
                cell.ljust(w) if at == 0 else cell.rjust(w)
                for at, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        notes = (
            "right: every total is that of a plain reading; refused: one clear message; refused*: though a plain reading goes through; "
            "read*: where no plain reading goes through; (:n): its seed."
        )
        return "\n".join([*aligned, notes])
