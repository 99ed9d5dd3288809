"""The same answers as an analyst writes them with sqlite3 and NumPy, without tools.

python -m benchmarks.peers.numpy_way QUESTION FILE...

Plain ways, for files as these: one process and one GPU at a time, kernels that do not overlap.
"""

from __future__ import annotations

import json
import sys

import numpy as np

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
    present,
)

_UM = f"FROM {MEMCPY} WHERE copyKind IN (11, 12, 13)"


def _read(connection, columns, rest):
    rows = connection.execute(f"SELECT {columns} {rest}").fetchall()
    return np.array(rows, dtype=np.int64).reshape(-1, columns.count(",") + 1).T


def _sums(keys, *values):
    """Count and sums by key: exact, in 64-bit integers."""
    unique, at, n = np.unique(keys, return_inverse=True, return_counts=True)
    sums = []
    for value in values:
        total = np.zeros(len(unique), np.int64)
        np.add.at(total, at, value)
        sums.append(total)
    return unique, n, sums


def totals(connection):
    there = present(connection)
    figures = dict.fromkeys(
        (
            "n_migrations", "htod_bytes", "dtoh_bytes", "dtod_bytes", "min_va", "max_va",
            "n_fault_rows", "n_page_faults", "n_cpu_faults",
        )
    )  # fmt: skip
    causes = {}
    if MEMCPY in there:
        kind, cause, size, va = _read(
            connection, "copyKind, migrationCause, bytes, virtualAddress", _UM
        )
        figures["n_migrations"] = len(kind)
        for number, direction in DIRECTIONS.items():
            figures[f"{direction}_bytes"] = int(size[kind == number].sum())
        if len(va):
            figures |= {"min_va": int(va.min()), "max_va": int(va.max())}
        pairs, n, (moved,) = _sums(kind * 100 + cause, size)
        for pair, count, total in zip(pairs.tolist(), n.tolist(), moved.tolist(), strict=True):
            causes[f"{DIRECTIONS[pair // 100]} {pair % 100}"] = {"n": count, "bytes": total}
    if GPU_FAULTS in there:
        (n,) = _read(connection, "numberOfPageFaults", f"FROM {GPU_FAULTS}")
        figures |= {"n_fault_rows": len(n), "n_page_faults": int(n.sum())}
    if CPU_FAULTS in there:
        (start,) = _read(connection, "start", f"FROM {CPU_FAULTS}")
        figures["n_cpu_faults"] = len(start)
    return {"totals": {"all": figures}, "by cause": causes}


def places(connection):
    there, blocks, names = present(connection), {}, []

    def put(found, columns):
        names.extend(columns)
        for block, *values in zip(
            found.tolist(), *(column.tolist() for column in columns.values()), strict=True
        ):
            blocks.setdefault(str(block), {}).update(zip(columns, values, strict=True))

    if MEMCPY in there:
        kind, cause, size, va = _read(
            connection, "copyKind, migrationCause, bytes, virtualAddress", _UM
        )
        by_fault = (cause == 2) | (cause == 3)
        parts = {
            "htod_bytes": kind == 11,
            "dtoh_bytes": kind == 12,
            "fault_in_bytes": (kind != 12) & by_fault,
            "fault_out_bytes": (kind == 12) & by_fault,
            "evicted_bytes": (kind == 12) & (cause == 4),
        }
        unique, _, sums = _sums(va // BLOCK, *(size * part for part in parts.values()))
        put(unique, dict(zip(parts, sums, strict=True)))
    if GPU_FAULTS in there:
        va, n = _read(connection, "address, numberOfPageFaults", f"FROM {GPU_FAULTS}")
        unique, rows, (counts,) = _sums(va // BLOCK, n)
        put(unique, {"n_fault_rows": rows, "n_page_faults": counts})
    if CPU_FAULTS in there:
        (va,) = _read(connection, "address", f"FROM {CPU_FAULTS}")
        unique, rows, _ = _sums(va // BLOCK)
        put(unique, {"n_cpu_faults": rows})
    return {
        "by VA block": {row: dict.fromkeys(names, 0) | values for row, values in blocks.items()}
    }


def functions(connection):
    if CPU_FAULTS not in present(connection):
        return {}
    (at,) = _read(connection, "CpuInstruction", f"FROM {CPU_FAULTS}")
    names = dict(connection.execute("SELECT id, value FROM StringIds"))
    unique, n, _ = _sums(at)
    rows = zip(unique.tolist(), n.tolist(), strict=True)
    return {
        "by function": {str(names.get(number)): {"n_cpu_faults": count} for number, count in rows}
    }


def kernels(connection):
    if not {KERNEL, GPU_FAULTS} <= present(connection):
        return {}
    start, end, name = _read(connection, "start, end, shortName", f"FROM {KERNEL} ORDER BY start")
    at, n = _read(connection, "start, numberOfPageFaults", f"FROM {GPU_FAULTS}")
    names = dict(connection.execute("SELECT id, value FROM StringIds"))
    before = np.searchsorted(start, at, side="right") - 1
    inside = (before >= 0) & (at < end[before]) if len(start) else np.zeros(len(at), bool)
    owner = np.where(inside, name[before] if len(name) else 0, -1)
    unique, rows, (counts,) = _sums(owner, n)
    found = {}
    for number, count, total in zip(unique.tolist(), rows.tolist(), counts.tolist(), strict=True):
        label = UNATTRIBUTED if number < 0 else names[number]
        found[label] = {"n_fault_rows": count, "n_page_faults": total}
    return {"by kernel": found}


def episodes(connection):
    if GPU_FAULTS not in present(connection):
        return {}
    start, end = _read(connection, "start, end", f"FROM {GPU_FAULTS} ORDER BY start, end")
    if not len(start):
        return {"episodes": {}}
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] - reach[:-1] > GAP_NS]))
    last = np.append(first[1:], len(start)) - 1
    rows = zip(
        start[first].tolist(), reach[last].tolist(), (last - first + 1).tolist(), strict=True
    )
    names = ("start_ns", "end_ns", "n_fault_rows")
    return {"episodes": {str(i): dict(zip(names, row, strict=True)) for i, row in enumerate(rows)}}


QUESTIONS = {f.__name__: f for f in (totals, places, functions, kernels, episodes)}


def main():
    question, *files = sys.argv[1:]
    print(json.dumps(answer(QUESTIONS[question], files)))


if __name__ == "__main__":
    main()
