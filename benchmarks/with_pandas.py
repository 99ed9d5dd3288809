"""The same five questions in pandas, in the manner of the vendor's recipes: a reference to time.

Each takes the tables as pandas frames and gives what a recipe would put into its notebook.
"""

from __future__ import annotations

import pandas as pd

_BLOCK = 2 << 20


def by_cause(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Bytes, count and duration by direction and cause."""
    frame = tables["migrations"].copy()
    frame["duration"] = frame["end_ns"] - frame["start_ns"]
    grouped = frame.groupby(["direction", "cause_id"], observed=True)
    return grouped.agg(
        n=("bytes", "size"), total=("bytes", "sum"), smallest=("bytes", "min"),
        largest=("bytes", "max"), duration=("duration", "sum"),
    ).sort_values("total", ascending=False)  # fmt: skip


def by_va_block(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Faults and bytes of each VA block, rows and copies put side by side."""
    moves, faults, cpu = (
        tables[name].copy() for name in ("migrations", "gpu_faults", "cpu_faults")
    )
    for frame in (moves, faults, cpu):
        frame["va_block"] = frame["va"] // _BLOCK
    per_cause = moves.pivot_table(
        index="va_block", columns=["direction", "cause_id"], values="bytes", aggfunc="sum",
        fill_value=0, observed=True,
    )  # fmt: skip
    per_cause.columns = [f"{a}_{b}" for a, b in per_cause.columns]
    rows = faults.groupby("va_block").agg(rows=("va", "size"), count=("n_page_faults", "sum"))
    host = cpu.groupby("va_block").agg(cpu=("va", "size"))
    return per_cause.join(rows, how="outer").join(host, how="outer").fillna(0)


def by_kernel(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Faults and migrations of each kernel, by the kernel that ran at their start."""
    kernels = tables["kernels"].sort_values("start_ns")[["start_ns", "end_ns", "name"]]
    parts = []
    for name in ("gpu_faults", "migrations"):
        events = tables[name].sort_values("start_ns")
        joined = pd.merge_asof(events, kernels, on="start_ns", suffixes=("", "_kernel"))
        inside = joined["start_ns"] < joined["end_ns_kernel"]
        joined["name"] = joined["name"].where(inside, "unattributed")
        value = "n_page_faults" if name == "gpu_faults" else "bytes"
        parts.append(joined.groupby("name")[value].agg(["size", "sum"]).add_prefix(f"{name}_"))
    return parts[0].join(parts[1], how="outer").fillna(0)


def refaults(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """What came back after an eviction, block by block, each arrival tied to the eviction before."""
    moves = tables["migrations"].copy()
    moves["va_block"] = moves["va"] // _BLOCK
    evicted = moves[moves["cause_id"] == 4][["va_block", "end_ns", "bytes"]]
    evicted = evicted.rename(columns={"end_ns": "start_ns", "bytes": "evicted"})
    evicted["evicted_ns"] = evicted["start_ns"]
    came = moves[moves["direction"] == "htod"][["va_block", "start_ns", "bytes"]]
    joined = pd.merge_asof(
        came.sort_values("start_ns"), evicted.sort_values("start_ns"), on="start_ns", by="va_block"
    ).dropna(subset=["evicted_ns"])
    joined["distance"] = joined["start_ns"] - joined["evicted_ns"]
    return joined.groupby("va_block").agg(
        back=("bytes", "sum"), soonest=("distance", "min"), mean=("distance", "mean")
    )


def episodes(tables: dict[str, pd.DataFrame], gap_ns: int = 500_000) -> pd.DataFrame:
    """Stretches of time without a pause, with what each moved."""
    faults = tables["gpu_faults"].sort_values("start_ns").copy()
    reach = faults["end_ns"].cummax().shift()
    faults["episode"] = (faults["start_ns"] - reach > gap_ns).cumsum()
    spans = faults.groupby("episode").agg(
        start=("start_ns", "min"), end=("end_ns", "max"), rows=("va", "size"),
        blocks=("va", lambda va: (va // _BLOCK).nunique()),
    )  # fmt: skip
    starts = faults[["start_ns", "episode"]]
    moves = pd.merge_asof(tables["migrations"].sort_values("start_ns"), starts, on="start_ns")
    return spans.join(moves.groupby("episode").agg(bytes=("bytes", "sum")))


QUESTIONS = {
    "migrations_by_cause": by_cause,
    "faults_by_va_block": by_va_block,
    "faults_by_kernel": by_kernel,
    "refaults_by_va_block": refaults,
    "fault_episodes": episodes,
}
"""By the analysis of nsan that answers the same question, and more of it."""
