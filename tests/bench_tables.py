"""Tables as a program of the microbenchmark writes them of itself, by hand."""

from __future__ import annotations

import csv
import io
import json

import exports as x

COLUMNS = ("allocation", "name", "role", "kind", "va", "bytes", "alloc_ns", "free_ns")
START_UTC_NS = 1_700_000_000_000_000_000


def row(name, va, size, alloc_ns, *, kind="managed", free_ns=None, role="array"):
    return (name, role, kind, va, size, alloc_ns, "" if free_ns is None else free_ns)


def write(folder, rows, *, pid=x.PID, about=(), head=COLUMNS):
    """Write run.json and allocations.csv; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(head)
    table.writerows((number, *each) for number, each in enumerate(rows))
    (folder / "allocations.csv").write_bytes(text.getvalue().encode())
    facts = {"nsan_microbench": 1, "program": "uvm_bench", "status": "ok", "pid": pid}
    facts |= {"start_utc_ns": START_UTC_NS, **dict(about)}
    (folder / "run.json").write_text(json.dumps(facts) + "\n")
    return folder
