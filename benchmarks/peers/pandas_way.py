"""The same answers as an analyst writes them with pandas: read_sql, then groupby.

    python -m benchmarks.peers.pandas_way QUESTION FILE... [-o FOLDER]

Plain ways, for files as these: one process and one GPU at a time, kernels that do not overlap.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path

import pandas as pd

from benchmarks.peers.tables import (
    BLOCK,
    CPU_FAULTS,
    DIRECTIONS,
    GAP_NS,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    UNATTRIBUTED,
    answer,
    connect,
    present,
)

_MOVED = (
    f"SELECT copyKind, migrationCause, bytes, virtualAddress, start, end FROM {MEMCPY} "
    "WHERE copyKind IN (11, 12, 13)"
)


def _rows(frame: pd.DataFrame) -> dict:
    return {str(row): values for row, values in frame.to_dict("index").items()}


def _moved(connection) -> pd.DataFrame:
    frame = pd.read_sql(_MOVED, connection)
    frame["direction"] = frame["copyKind"].map(DIRECTIONS)
    return frame


def totals(connection):
    there, figures, causes = present(connection), {}, {}
    if MEMCPY in there:
        frame = _moved(connection)
        sums = frame.groupby("direction")["bytes"].sum()
        figures |= {f"{name}_bytes": int(sums.get(name, 0)) for name in DIRECTIONS.values()}
        place, some = frame["virtualAddress"], len(frame) > 0
        figures |= {
            "n_migrations": len(frame),
            "min_va": int(place.min()) if some else None,
            "max_va": int(place.max()) if some else None,
        }
        grouped = frame.groupby(["direction", "migrationCause"])["bytes"].agg(["size", "sum"])
        causes = {
            f"{direction} {cause}": {"n": int(n), "bytes": int(total)}
            for (direction, cause), n, total in grouped.itertuples()
        }
    if GPU_FAULTS in there:
        frame = pd.read_sql(f"SELECT numberOfPageFaults FROM {GPU_FAULTS}", connection)
        figures |= {"n_fault_rows": len(frame), "n_page_faults": int(frame.iloc[:, 0].sum())}
    if CPU_FAULTS in there:
        figures["n_cpu_faults"] = len(pd.read_sql(f"SELECT start FROM {CPU_FAULTS}", connection))
    return {"totals": {"all": figures}, "by cause": causes}


def places(connection):
    there, parts = present(connection), []
    if MEMCPY in there:
        frame = _moved(connection)
        by_fault, out = frame["migrationCause"].isin([2, 3]), frame["direction"] == "dtoh"
        wanted = {
            "htod_bytes": frame["direction"] == "htod",
            "dtoh_bytes": out,
            "fault_in_bytes": by_fault & ~out,
            "fault_out_bytes": by_fault & out,
            "evicted_bytes": out & (frame["migrationCause"] == 4),
        }
        columns = pd.DataFrame({name: frame["bytes"] * part for name, part in wanted.items()})
        parts.append(columns.groupby(frame["virtualAddress"] // BLOCK).sum())
    if GPU_FAULTS in there:
        frame = pd.read_sql(
            f"SELECT address, numberOfPageFaults AS n FROM {GPU_FAULTS}", connection
        )
        block = frame.groupby(frame["address"] // BLOCK)["n"]
        parts.append(block.agg(n_fault_rows="size", n_page_faults="sum"))
    if CPU_FAULTS in there:
        frame = pd.read_sql(f"SELECT address FROM {CPU_FAULTS}", connection)
        parts.append((frame["address"] // BLOCK).value_counts().rename("n_cpu_faults"))
    return {"by VA block": _rows(pd.concat(parts, axis=1).fillna(0).astype("int64"))}


def functions(connection):
    if CPU_FAULTS not in present(connection):
        return {}
    names = pd.read_sql("SELECT id, value FROM StringIds", connection)
    frame = pd.read_sql(f"SELECT CpuInstruction AS id FROM {CPU_FAULTS}", connection)
    counts = frame.merge(names, on="id", how="left")["value"].value_counts(dropna=False)
    return {"by function": _rows(counts.rename("n_cpu_faults").to_frame())}


def kernels(connection):
    if not {KERNEL, GPU_FAULTS} <= present(connection):
        return {}
    ran = pd.read_sql(
        f"SELECT start, end, value AS name FROM {KERNEL} JOIN StringIds ON id = shortName "
        "ORDER BY start",
        connection,
    )
    faults = pd.read_sql(
        f"SELECT start, numberOfPageFaults AS n FROM {GPU_FAULTS} ORDER BY start", connection
    )
    joined = pd.merge_asof(faults, ran, on="start")
    inside = joined["start"] < joined["end"]
    joined["name"] = joined["name"].where(inside, UNATTRIBUTED)
    grouped = joined.groupby("name")["n"].agg(n_fault_rows="size", n_page_faults="sum")
    return {"by kernel": _rows(grouped)}


def episodes(connection):
    if GPU_FAULTS not in present(connection):
        return {}
    frame = pd.read_sql(f"SELECT start, end FROM {GPU_FAULTS} ORDER BY start, end", connection)
    pause = frame["start"] - frame["end"].cummax().shift()
    grouped = frame.groupby((pause > GAP_NS).cumsum())
    found = grouped.agg(
        start_ns=("start", "min"), end_ns=("end", "max"), n_fault_rows=("start", "size")
    )
    return {"episodes": _rows(found)}


def transfers(connection):
    frame = _moved(connection)
    frame["ns"] = frame["end"] - frame["start"]
    grouped = frame.groupby("direction").agg(
        n=("ns", "size"), bytes=("bytes", "sum"), total_ns=("ns", "sum"), min_ns=("ns", "min"),
        max_ns=("ns", "max"),
    )  # fmt: skip
    frame = frame.sort_values("start")
    busy = {}
    for (direction, cause), part in frame.groupby(["direction", "migrationCause"]):
        reach = part["end"].cummax()
        begin = part["start"].clip(lower=reach.shift(fill_value=0))
        busy[f"{direction} {cause}"] = {"busy_ns": int((part["end"] - begin).clip(lower=0).sum())}
    return {"by direction": _rows(grouped), "busy by cause": busy}


def to_parquet(connection, folder: Path, names) -> None:
    """Write tables as they are, one file each."""
    folder.mkdir(parents=True)
    for name in sorted(present(connection) & set(names)):
        pd.read_sql(f'SELECT * FROM "{name}"', connection).to_parquet(folder / f"{name}.parquet")


QUESTIONS = {f.__name__: f for f in (totals, places, functions, kernels, episodes, transfers)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=[*QUESTIONS, "parquet"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--table", action="append", default=[])
    args = parser.parse_args()
    if args.question == "parquet":
        with closing(connect(*args.files)) as connection:
            to_parquet(connection, args.output, args.table)
    else:
        print(json.dumps(answer(QUESTIONS[args.question], args.files)))


if __name__ == "__main__":
    main()
