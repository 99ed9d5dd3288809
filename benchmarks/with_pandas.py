"""The same five questions in pandas, in the manner of the vendor's recipes: a reference to time.

Each takes the tables as pandas frames and gives what a recipe would put into its notebook.
"""

from __future__ import annotations

import numpy as np
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


def _union(frame: pd.DataFrame) -> pd.DataFrame:
    """Merge overlapping intervals."""
    frame = frame.sort_values("start_ns")
    island = (frame["start_ns"] > frame["end_ns"].cummax().shift()).cumsum()
    return frame.groupby(island).agg(start_ns=("start_ns", "min"), end_ns=("end_ns", "max"))


def _covered(spans: pd.DataFrame, start: int, end: int) -> int:
    inside = spans[(spans["start_ns"] < end) & (spans["end_ns"] > start)]
    return int((inside["end_ns"].clip(upper=end) - inside["start_ns"].clip(lower=start)).sum())


def by_kernel(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Faults, outcome of batches, migrations by cause and exposed time of each kernel."""
    kernels = tables["kernels"].sort_values("start_ns")[["start_ns", "end_ns", "name"]]
    faults = tables["gpu_faults"].sort_values("end_ns").reset_index(drop=True)
    moves = tables["migrations"].sort_values("start_ns").reset_index(drop=True)
    # A batch has the copies that start in (previous end, end]; without any it is a first touch.
    ends = faults[["end_ns"]].assign(batch=faults.index)
    into = moves[moves["direction"] != "dtoh"]
    served = pd.merge_asof(
        into[["start_ns", "bytes"]], ends.rename(columns={"end_ns": "start_ns"}), on="start_ns",
        direction="forward",
    )  # fmt: skip
    brought = served.groupby("batch")["bytes"].sum()
    faults["bytes"] = brought.reindex(faults.index).fillna(0)
    faults["first_touch"] = faults["bytes"] == 0
    parts = []
    for events, sums in (
        (
            faults,
            {
                "rows": ("va", "size"),
                "count": ("n_page_faults", "sum"),
                "first": ("first_touch", "sum"),
            },
        ),
        (moves, {"copies": ("va", "size"), "bytes": ("bytes", "sum")}),
    ):
        joined = pd.merge_asof(
            events.sort_values("start_ns"), kernels, on="start_ns", suffixes=("", "_kernel")
        )
        inside = joined["start_ns"] < joined["end_ns_kernel"]
        joined["name"] = joined["name"].where(inside, "unattributed")
        parts.append(joined.groupby("name").agg(**sums))
        if events is moves:
            causes = joined.pivot_table(
                index="name", columns="cause_id", values="bytes", aggfunc="sum", fill_value=0
            )
            parts.append(causes.add_prefix("cause_"))
    waits, copies = _union(faults), _union(moves)
    exposed = kernels.apply(lambda k: _covered(waits, k["start_ns"], k["end_ns"]), axis=1)
    moving = kernels.apply(lambda k: _covered(copies, k["start_ns"], k["end_ns"]), axis=1)
    times = kernels.assign(exposed=exposed, moving=moving).groupby("name")[["exposed", "moving"]]
    return pd.concat([*parts, times.sum()], axis=1).fillna(0)


def refaults(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """What came back after an eviction, page by page, added up by block."""
    moves = tables["migrations"]
    moves = moves[(moves["cause_id"] == 4) | (moves["direction"] != "dtoh")]
    n = (moves["bytes"] // 4096).to_numpy()
    pages = moves.loc[moves.index.repeat(n), ["va", "start_ns", "end_ns", "cause_id"]]
    step = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    pages["page"] = pages["va"].to_numpy() // 4096 + step.astype(np.uint64)
    pages = pages.sort_values(["page", "start_ns"])
    before = pages.groupby("page").shift()
    again = (before["cause_id"] == 4) & (pages["cause_id"] != 4)
    distance = (pages["start_ns"] - before["end_ns"])[again.to_numpy()].to_numpy()
    back = pages[again.to_numpy()].assign(distance=distance)
    back["va_block"] = back["page"] // 512
    evicted = moves[moves["cause_id"] == 4].groupby(moves["va"] // _BLOCK)["bytes"].sum()
    found = back.groupby("va_block").agg(
        n=("page", "size"), soonest=("distance", "min"), mean=("distance", "mean")
    )
    return found.assign(back=found["n"] * 4096).join(evicted.rename("evicted"), how="outer")


def episodes(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Stretches of time without a pause, the pause from the trace, with what each moved."""
    faults = tables["gpu_faults"].sort_values("start_ns").copy()
    pause = (faults["start_ns"] - faults["end_ns"].cummax().shift()).clip(lower=0)
    ordered = np.sort(pause.dropna().to_numpy()) + 1
    ratio = ordered[1:] / ordered[:-1]
    knee = int(ratio[len(ratio) // 2 :].argmax()) + len(ratio) // 2 if len(ratio) else 0
    gap = np.sqrt(ordered[knee] * ordered[knee + 1]) if len(ratio) else 0
    faults["episode"] = (pause > gap).cumsum()
    spans = faults.groupby("episode").agg(
        start=("start_ns", "min"), end=("end_ns", "max"), rows=("va", "size")
    )
    access = faults.pivot_table(
        index="episode", columns="access", aggfunc="size", fill_value=0, observed=True
    )
    starts = faults[["start_ns", "episode"]]
    moves = tables["migrations"][tables["migrations"]["direction"] != "dtoh"]
    moves = pd.merge_asof(moves.sort_values("start_ns"), starts, on="start_ns")
    moves["block"], moves["page"] = moves["va"] // _BLOCK, moves["va"] // 4096
    faulted = moves[moves["cause_id"] == 2]
    kernels = tables["kernels"].sort_values("start_ns")[["start_ns", "name"]]
    ran = (
        pd.merge_asof(moves, kernels, on="start_ns").groupby("episode")["name"].agg(pd.Series.mode)
    )
    return spans.join(access).join(
        [
            moves.groupby("episode").agg(bytes=("bytes", "sum"), blocks=("block", "nunique")),
            faulted.groupby("episode").agg(pages=("page", "nunique")),
            ran,
        ]
    )


QUESTIONS = {
    "migrations_by_cause": by_cause,
    "faults_by_va_block": by_va_block,
    "faults_by_kernel": by_kernel,
    "refaults_by_va_block": refaults,
    "fault_episodes": episodes,
}
"""By the analysis of nsan that answers the same question, and more of it."""
