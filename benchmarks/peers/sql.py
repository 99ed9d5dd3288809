"""The answers of plain SQL, and of a plain Python loop where SQL has no short way: what is held to be true.

    python -m benchmarks.peers.sql QUESTION FILE...

Python's own sqlite3, nothing of nsan. A table that is absent was not recorded: its figures are None.
"""

from __future__ import annotations

import bisect
import json
import sys

from benchmarks.peers.tables import (
    AMBIGUOUS,
    BLOCK,
    CPU_FAULTS,
    DIRECTIONS,
    GAP_NS,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    UNATTRIBUTED,
    answer,
    present,
)

_UM = f"{MEMCPY} WHERE copyKind IN (11, 12, 13)"
_PER_BLOCK = {
    MEMCPY: (
        "virtualAddress", f"FROM {_UM} GROUP BY 1",
        {
            "htod_bytes": "sum(bytes * (copyKind = 11))",
            "dtoh_bytes": "sum(bytes * (copyKind = 12))",
            "fault_in_bytes": "sum(bytes * (copyKind != 12 AND migrationCause IN (2, 3)))",
            "fault_out_bytes": "sum(bytes * (copyKind = 12 AND migrationCause IN (2, 3)))",
            "evicted_bytes": "sum(bytes * (copyKind = 12 AND migrationCause = 4))",
        },
    ),
    GPU_FAULTS: (
        "address", f"FROM {GPU_FAULTS} GROUP BY 1",
        {"n_fault_rows": "count(*)", "n_page_faults": "sum(numberOfPageFaults)"},
    ),
    CPU_FAULTS: ("address", f"FROM {CPU_FAULTS} GROUP BY 1", {"n_cpu_faults": "count(*)"}),
}  # fmt: skip


def _one(connection, figures, source, *, there):
    if not there:
        return dict.fromkeys(figures)
    expressions = ", ".join(figures.values())
    return dict(
        zip(
            figures,
            connection.execute(f"SELECT {expressions} FROM {source}").fetchone(),
            strict=True,
        )
    )


def totals(connection):
    """Sums over the file, and of migrations by direction and cause."""
    there = present(connection)
    moved = {
        "n_migrations": "count(*)",
        **{
            f"{d}_bytes": f"ifnull(sum(bytes * (copyKind = {k})), 0)" for k, d in DIRECTIONS.items()
        },
        "min_va": "min(virtualAddress)",
        "max_va": "max(virtualAddress)",
    }
    faults = {"n_fault_rows": "count(*)", "n_page_faults": "ifnull(sum(numberOfPageFaults), 0)"}
    figures = _one(connection, moved, _UM, there=MEMCPY in there)
    figures |= _one(connection, faults, GPU_FAULTS, there=GPU_FAULTS in there)
    figures |= _one(connection, {"n_cpu_faults": "count(*)"}, CPU_FAULTS, there=CPU_FAULTS in there)
    causes = {}
    if MEMCPY in there:
        sql = f"SELECT copyKind, migrationCause, count(*), sum(bytes) FROM {_UM} GROUP BY 1, 2"
        for kind, cause, n, n_bytes in connection.execute(sql):
            causes[f"{DIRECTIONS[kind]} {cause}"] = {"n": n, "bytes": n_bytes}
    return {"totals": {"all": figures}, "by cause": causes}


def places(connection):
    """What happened in each VA block of 2 MiB."""
    there, blocks, names = present(connection), {}, []
    for table, (address, rest, figures) in _PER_BLOCK.items():
        if table not in there:
            continue
        names += figures
        expressions = ", ".join(figures.values())
        for block, *values in connection.execute(
            f"SELECT {address} / {BLOCK}, {expressions} {rest}"
        ):
            blocks.setdefault(str(block), {}).update(zip(figures, values, strict=True))
    return {
        "by VA block": {row: dict.fromkeys(names, 0) | values for row, values in blocks.items()}
    }


def functions(connection):
    """CPU page faults of each function."""
    if CPU_FAULTS not in present(connection):
        return {}
    sql = (
        f"SELECT value, count(*) FROM {CPU_FAULTS} LEFT JOIN StringIds "
        "ON StringIds.id = CpuInstruction GROUP BY 1"
    )
    rows = {str(name): {"n_cpu_faults": n} for name, n in connection.execute(sql)}
    return {"by function": rows}


def transfers(connection):
    """Count, bytes and summed time of migrations by direction, and their busy time by cause."""
    sql = (
        "SELECT copyKind, count(*), sum(bytes), sum(end - start), min(end - start), max(end - start) "
        f"FROM {_UM} GROUP BY 1"
    )
    names = ("n", "bytes", "total_ns", "min_ns", "max_ns")
    rows = {
        DIRECTIONS[kind]: dict(zip(names, values, strict=True))
        for kind, *values in connection.execute(sql)
    }
    busy = {}
    for kind, cause, *span in connection.execute(
        f"SELECT copyKind, migrationCause, start, end FROM {_UM} ORDER BY 1, 2, 3"
    ):
        busy.setdefault(f"{DIRECTIONS[kind]} {cause}", []).append(span)
    union = {row: {"busy_ns": _union(spans)} for row, spans in busy.items()}
    return {"by direction": rows, "busy by cause": union}


def _union(spans):
    covered, reach = 0, None
    for start, end in spans:
        begin = start if reach is None else max(start, reach)
        covered += max(end - begin, 0)
        reach = end if reach is None else max(reach, end)
    return covered


def kernels(connection):
    """Fault rows, and their counts, of the kernel that ran when they were raised."""
    if not {KERNEL, GPU_FAULTS} <= present(connection):
        return {}
    found = {}
    work = {}
    sql = (
        "SELECT globalPid, deviceId, start, end, value FROM "
        f"{KERNEL} LEFT JOIN StringIds ON StringIds.id = shortName ORDER BY 3"
    )
    for *place, start, end, name in connection.execute(sql):
        work.setdefault(tuple(place), []).append((start, end, name))
    starts = {place: [start for start, *_ in ran] for place, ran in work.items()}
    longest = {place: max(end - start for start, end, _ in ran) for place, ran in work.items()}
    sql = f"SELECT globalPid, deviceId, start, numberOfPageFaults FROM {GPU_FAULTS}"
    for *place, at, n in connection.execute(sql):
        where = tuple(place)
        ran = _running(work.get(where, []), starts.get(where, []), longest.get(where, 0), at)
        name = UNATTRIBUTED if not ran else ran[0] if len(ran) == 1 else AMBIGUOUS
        row = found.setdefault(name, {"n_fault_rows": 0, "n_page_faults": 0})
        row["n_fault_rows"] += 1
        row["n_page_faults"] += n
    return {"by kernel": found}


def _running(work, starts, longest, at):
    """Names of the kernels of [start, end) that hold an instant."""
    found, i = [], bisect.bisect_right(starts, at) - 1
    while i >= 0 and starts[i] + longest > at:
        if work[i][1] > at:
            found.append(work[i][2])
        i -= 1
    return found


def episodes(connection):
    """Stretches of fault service without a pause longer than the gap."""
    if GPU_FAULTS not in present(connection):
        return {}
    rows, before, reach = {}, None, 0
    sql = f"SELECT globalPid, deviceId, start, end FROM {GPU_FAULTS} ORDER BY 1, 2, 3, 4"
    for *place, start, end in connection.execute(sql):
        if place != before or start - reach > GAP_NS:
            row = rows.setdefault(str(len(rows)), {"start_ns": start, "n_fault_rows": 0})
            reach, before = end, place
        reach = max(reach, end)
        row["end_ns"] = reach
        row["n_fault_rows"] += 1
    return {"episodes": rows}


QUESTIONS = {
    answer.__name__: answer for answer in (totals, places, functions, transfers, kernels, episodes)
}


def main():
    question, *files = sys.argv[1:]
    print(json.dumps(answer(QUESTIONS[question], files)))


if __name__ == "__main__":
    main()
