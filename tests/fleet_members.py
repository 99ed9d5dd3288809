"""Members of a fleet with figures of one's own, as the totals of a real store have them, and frames of their figures."""

from __future__ import annotations

import polars as pl

from nsan.analysis.fleet.peers import JUDGED
from nsan.fleet.member import Failure, Member
from nsan.info import Capture, TraceInfo

MS = 1_000_000
MIB = 1 << 20
SWITCHES = {
    "gpu_faults": "--cuda-um-gpu-page-faults=true",
    "cpu_faults": "--cuda-um-cpu-page-faults=true",
    "migrations": "--trace=cuda",
    "allocations": "--cuda-memory-usage=true",
    "nvtx": "--trace=cuda,nvtx",
    "kernels": "--trace=cuda",
}


def group(direction, cause, n_bytes, busy_ns, *, n=1, pid=7, device=0):
    """Make a group of migrations as totals have it."""
    return {
        "direction": direction,
        "cause": cause,
        "device_id": device,
        "pid": pid,
        "n": n,
        "bytes": n_bytes,
        "min_bytes": 1,
        "max_bytes": n_bytes,
        "min_va": 0,
        "max_va": 0,
        "busy_ns": busy_ns,
    }


def info(kind="nsys-sqlite", *, off=(), start=None):
    """Make what is known about a capture; ``off``: kinds of events that were not recorded."""
    capture = {
        event: Capture("not_recorded" if event in off else "recorded", switch, "by this test")
        for event, switch in SWITCHES.items()
    }
    return TraceInfo("a.sqlite", kind, session_start_utc_ns=start, capture=capture).to_dict()


def totals(groups=(), *, busy_ns=None, faults_ns=0, fault_rows=0, **more):
    """Make totals; what is not named is nothing."""
    counts = dict.fromkeys(
        (
            *("gpu_faults", "cpu_faults", "migrations", "copies", "memsets", "kernels"),
            *("driver_events", "api_calls", "nvtx_ranges", "nvtx_marks"),
        ),
        0,
    )
    duration = more.pop("duration_ns", 1000 * MS)
    fault = {"access": "read", "device_id": 0, "pid": 7, "n_rows": fault_rows}
    fault |= {"n_page_faults": fault_rows, "n_addresses": fault_rows, "n_va_blocks": fault_rows}
    device = {"device_id": 0, "pid": None, "gpu_id": 0, "name": more.pop("gpu", "GPU X")}
    device |= {"chip": None, "total_memory_bytes": 1000 * MIB, "memory_bytes_per_s": None}
    device |= {"n_sms": None, "compute_capability": None}
    known = {
        "counts": counts | {"migrations": len(groups), "gpu_faults": fault_rows},
        "span": {"first_ns": 0, "last_ns": duration, "duration_ns": duration},
        "gpu_faults": {
            "groups": [fault] if fault_rows else [],
            "n_addresses": fault_rows,
            "n_va_blocks": fault_rows,
            "busy_ns": faults_ns,
        },
        "cpu_faults": {"groups": [], "n_addresses": 0, "n_va_blocks": 0},
        "migrations": {
            "groups": list(groups),
            "busy_ns": sum(each["busy_ns"] for each in groups) if busy_ns is None else busy_ns,
        },
        "kernels": {"n": 1, "n_graph_launches": 0, "busy_ns": 5},
        "driver_events": {},
        "managed": {
            "n_allocations": 1,
            "n_managed_allocations": 1,
            "managed_bytes": more.pop("managed_bytes", 500 * MIB),
            "n_managed_calls": 1,
        },
        "devices": [device],
        "processes": [{"pid": 7, "name": more.pop("program", "train")}],
        "diagnostics": [],
        "figures": {
            "migration figures": dict.fromkeys(
                (
                    *("n", "n_part_pages", "n_over_va_block", "n_no_length", "n_other_cause"),
                    *("n_no_cause", "n_no_address", "n_no_process"),
                ),
                0,
            ),
            "clock figures": {"n_outside_kernels": 0, "kernel_lag_ns": None},
        },
        "fault_rows": [],
        "lost_rows": {"holes": [], "replay": []},
    }
    assert not more, f"no such figures: {more}"
    return known


def member(run="night", rank=0, *, source=None, off=(), start=None, kind="nsys-sqlite", **figures):
    """Make a member; ``figures`` as of :func:`totals`."""
    name = f"{run}/rank{rank}.sqlite" if source is None else source
    return Member(run, rank, name, info(kind, off=off, start=start), totals(**figures))


def moving(busy_ms, *, n_bytes=MIB, cause="coherence", direction="htod"):
    """Make groups of migrations that take so long."""
    return [group(direction, cause, n_bytes, busy_ms * MS)]


def run_of(times_ms, *, run="night", **more):
    """Make the members of a run from the times in which their migrations were in flight."""
    return [member(run, rank, groups=moving(busy), **more) for rank, busy in enumerate(times_ms)]


def failure(source="night/rank9.sqlite", reason="it is damaged.", *, run="night", rank=9):
    return Failure(run, rank, source, reason)


def frame(values, *, run="r", durations=None, figure="migrations_busy_ns", program="p"):
    """Make figures of the reports of a run from values of one figure in ms; None is not known."""
    durations = durations or [1000] * len(values)
    rows = [
        {
            "run": run,
            "rank": rank,
            "source": f"{run}{rank}",
            "program": program,
            "duration_ns": None if duration is None else int(duration * MS),
            **dict.fromkeys(JUDGED),
            figure: None if value is None else int(value * MS),
            "n_failed": 0,
        }
        for rank, (value, duration) in enumerate(zip(values, durations, strict=True))
    ]
    kinds = {"run": pl.String, "rank": pl.Int64, "source": pl.String, "program": pl.String}
    numbers = dict.fromkeys(("duration_ns", *JUDGED, "n_failed"), pl.Int64)
    return pl.DataFrame(rows, schema=kinds | numbers)
