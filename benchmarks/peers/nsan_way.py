"""How nsan is asked, and how its JSON is read: its commands as a user types them."""

from __future__ import annotations

import json
import sys

from benchmarks.peers.agreement import Answer
from benchmarks.peers.measuring import Taken
from benchmarks.peers.tables import BLOCK, GAP_NS, UNATTRIBUTED

NSAN = (sys.executable, "-m", "nsan")
COMMANDS = {
    "totals": ("summary",),
    "places": ("faults", "--by", "va-block"),
    "functions": ("attribute", "--by", "function"),
    "kernels": ("attribute",),
    "episodes": ("clusters", "--by", "episode", "--set", f"gap_ns={GAP_NS}"),
}
"""What is asked of nsan for each question."""

CAUSES = ("unknown", "user", "coherence", "prefetch", "eviction", "access_counters")


def command(question: str, file: str) -> list[str]:
    """Give the command of a question."""
    return [*NSAN, *COMMANDS[question], "-q", "--json", file]


def _va(text: str | None) -> int | None:
    return None if text is None else int(text, 16)


def totals(said: dict) -> Answer:
    moved, gpu, cpu = said["migrations"], said["gpu_faults"], said["cpu_faults"]
    figures = {name: moved[name] for name in ("htod_bytes", "dtoh_bytes", "dtod_bytes")}
    figures |= {
        "n_migrations": moved["n"],
        "min_va": _va(moved["min_va"]),
        "max_va": _va(moved["max_va"]),
        "n_fault_rows": gpu["n_rows"],
        "n_page_faults": gpu["n_page_faults"],
        "n_cpu_faults": cpu["n"],
    }
    causes: dict[str, dict[str, int]] = {}
    for group in moved["groups"] or ():
        row = f"{group['direction']} {CAUSES.index(group['cause'])}"
        sums = causes.setdefault(row, {"n": 0, "bytes": 0})
        sums["n"] += group["n"]
        sums["bytes"] += group["bytes"]
    return {"totals": {"all": figures}, "by cause": causes}


_PLACE = {
    "n_fault_rows": "n_fault_rows",
    "n_page_faults": "n_page_faults",
    "n_cpu_faults": "n_cpu_faults",
    "fault_out_bytes": "out_bytes",
    "evicted_bytes": "evicted_bytes",
}


def _places(said: dict) -> Answer:
    # Figures of what was not recorded stand as null there, and are not said here.
    blocks: dict[str, dict[str, int]] = {}
    for row in said["rows"]:
        sums = blocks.setdefault(str(int(row["va"], 16) // BLOCK), {})
        given = {ours: row[theirs] for ours, theirs in _PLACE.items()}
        given["fault_in_bytes"] = row["coherence_bytes"] + row["prefetch_bytes"]
        for name, value in given.items():
            if value is not None:
                sums[name] = sums.get(name, 0) + value
    return {"by VA block": blocks}


def _functions(said: dict) -> Answer:
    sums: dict[str, dict[str, int]] = {}
    for row in said["rows"]:
        if row["n_cpu_faults"]:
            name = sums.setdefault(str(row["function"]), {"n_cpu_faults": 0})
            name["n_cpu_faults"] += row["n_cpu_faults"]
    return {"by function": sums}


def _kernels(said: dict) -> Answer:
    sums: dict[str, dict[str, int]] = {}
    for row in said["rows"]:
        if not row["n_fault_rows"]:
            continue
        name = row["name"] if row["work"] == "kernel" else row["work"]
        one = sums.setdefault(name or UNATTRIBUTED, {"n_fault_rows": 0, "n_page_faults": 0})
        for figure in one:
            one[figure] += row[figure]
    return {"by kernel": sums}


def _episodes(said: dict) -> Answer:
    names = ("start_ns", "end_ns", "n_fault_rows")
    found = (row for row in said["rows"] if row["episode_id"] is not None)
    return {
        "episodes": {str(i): {name: row[name] for name in names} for i, row in enumerate(found)}
    }


_READ = {
    "totals": totals,
    "places": _places,
    "functions": _functions,
    "kernels": _kernels,
    "episodes": _episodes,
}


def read(question: str, taken: Taken) -> Answer:
    """Read what nsan printed."""
    return _READ[question](json.loads(taken.output))


def snapshot(taken: Taken) -> Answer:
    """Read `nsan allocator --json`."""
    said = json.loads(taken.output)
    (state,) = (row for row in said["state"] if row["pool"] == "all")
    figures = {name: state[name] for name in ("n_segments", "reserved_bytes", "allocated_bytes")}
    figures["n_entries"] = sum(device["n_entries"] for device in said["devices"])
    return {"snapshot": {"all": figures}}
