"""What the three papers claim, each with where it was read and how sure that is.

Sources and marks are those of the facts this project was built on: [P] read in the text or abstract of
the paper, [S] in its source code, [2] from elsewhere (a summary, the documentation of a repository),
[?] recalled and never found again. Of paper 1 no number is known, so none stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.markdown import Column, listed, table

PAPERS = {
    1: "Lin & Jeon, EuroMLSys'25, doi 10.1145/3721146.3721955",
    2: "Choi, Yeom, Kim, Cluster Computing 26(5) 2023, doi 10.1007/s10586-022-03805-x",
    3: "GMLake, ASPLOS'24, arXiv 2401.08156",
}

MARKS = {
    "P": "read in the text or the abstract of the paper",
    "S": "read in the source code",
    "2": "from elsewhere: a summary, the documentation of a repository",
    "?": "recalled, could not be verified",
}


@dataclass(frozen=True)
class Claim:
    """One claim.

    ``low`` and ``high`` bound the number that is claimed, in its own unit; None where there is none.
    """

    key: str
    paper: int
    says: str
    source: str
    mark: str
    low: float | None = None
    high: float | None = None

    def compare(self, value):
        """Say how a number found here lies to the claimed ones."""
        if value is None or self.low is None:
            return "unknown"
        if value < self.low:
            return "below"
        return "above" if value > self.high else "within"

    def count(self, values):
        """Say how many numbers found here lie below, within and above the claimed ones."""
        against = [self.compare(value) for value in values]
        words = ("below", "within", "above", "unknown")
        counts = [f"{against.count(word)} {word}" for word in words if word in against]
        return f"{listed(counts)} the claimed range" if counts else "no run to compare"


CLAIMS = (
    Claim(
        "faults", 1,
        "PCA cuts the overhead of handling page faults a lot",
        "abstract", "P",
    ),
    Claim(
        "moderate", 1,
        "PCA helps at moderate oversubscription (which factors these are is not known)",
        "abstract", "P",
    ),
    Claim("traffic", 1, "PCA raises migration traffic", "abstract", "P"),
    Claim(
        "lower", 2,
        "The gain of hints is larger at lower oversubscription",
        "digest of the paper at bohrium", "2",
    ),
    Claim(
        "too_many", 2,
        "Hints for too many tensors can lose",
        "digest of the paper at bohrium", "2",
    ),
    Claim(
        "object_fits", 2,
        "Prefetch of whole objects: +37 % (A100) and +39 % (RTX 3060) when it fits",
        "PASTA, CGO'26, V-C1", "P", 0.37, 0.39,
    ),
    Claim(
        "tensor_fits", 2,
        "Prefetch of tensors: +26 % (A100) and +30 % (RTX 3060) when it fits",
        "PASTA, CGO'26, V-C1", "P", 0.26, 0.30,
    ),
    Claim(
        "object_slow", 2,
        "Prefetch of whole objects at factor 3: 2.35 (RTX 3060) and 2.91 (A100) times slower",
        "PASTA, CGO'26, V-C1", "P", 2.35, 2.91,
    ),
    Claim(
        "tensor_three", 2,
        "Prefetch of tensors at factor 3: faster (RTX 3060) or slightly slower (A100); GPT-2 gains",
        "PASTA, CGO'26, V-C1", "P",
    ),
    Claim(
        "definition", 3,
        "Utilization = peak active / peak reserved, the peaks taken apart; fragmentation = 1 - that",
        "GMLake/README.md of the repository", "2",
    ),
    Claim(
        "points", 3,
        "Stitching adds 5 to 29 points of utilization (OPT-1.3B, Vicuna-13B, GPT-NeoX-20B, ZeRO-3, "
        "four A100-80GB)",
        "documentation of the repository", "2", 0.05, 0.29,
    ),
    Claim(
        "reserved", 3,
        "and reserves 4 to 17 GB less there",
        "documentation of the repository", "2", 4.0, 17.0,
    ),
    Claim(
        "best", 3,
        "Best case: fragmentation falls by 27 points, 25 GB saved; OPT-1.3B goes from 64 to 88 %",
        "documentation of the repository", "2",
    ),
    Claim(
        "caching", 3,
        "The caching allocator is about 10 times faster than native calls, with up to about 30 % "
        "fragmentation",
        "documentation of the repository", "2", 0.0, 0.30,
    ),
    Claim(
        "mean", 3,
        "Over eight models 9.2 GB less on average (at most 25), 15 % on average (at most 33)",
        "abstract", "?",
    ),
)  # fmt: skip


def claim(key):
    """Find a claim by its key."""
    return next(each for each in CLAIMS if each.key == key)


def claims_table(paper, found):
    """Set each claim of a paper beside what was found here.

    ``found`` says it by the key of the claim; a claim without an answer cannot be told by this table.
    """
    rows = [
        {
            "says": each.says,
            "source": f"{each.source} [{each.mark}]",
            "found": found.get(each.key, "This table cannot tell."),
        }
        for each in CLAIMS
        if each.paper == paper
    ]
    columns = (
        Column("says", f"Claim ({PAPERS[paper]})"),
        Column("source", "Source and mark"),
        Column("found", "Here"),
    )
    used = sorted({each.mark for each in CLAIMS if each.paper == paper})
    marks = "; ".join(f"[{mark}] {MARKS[mark]}" for mark in used)
    return f"{table(rows, columns)}\n\nMarks: {marks}."
