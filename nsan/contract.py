"""The first answer: one document that text, CSV, JSON and reports are made from.

Standard library only: an unfiltered summary of a known capture reads a manifest and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import nsan
from nsan.health import NVPROF_KINDS, checks, is_coherent
from nsan.units import NS_PER_S, format_address

if TYPE_CHECKING:
    from nsan.trace import Trace

SCHEMA: Final = 1
"""Version of the JSON contract; a key never changes its meaning within one version."""

CAPTURE_KINDS: Final = ("gpu_faults", "cpu_faults", "migrations", "allocations", "nvtx", "kernels")


def summary(trace: Trace | str | Path) -> dict[str, Any]:
    """Summarise a capture.

    Parameters
    ----------
    trace : Trace, str or Path
        A trace, whole or filtered, or the path of one.

    Returns
    -------
    dict
        The JSON contract (docs/json.md): plain containers, times in ns, sizes in
        bytes, addresses as hexadecimal text. What was not recorded, or could not be read, is None.
    """
    if isinstance(trace, str | Path):
        from nsan.opening import store_of

        _, manifest = store_of(Path(trace))
        return document(manifest["info"], manifest["totals"])
    from nsan.totals import totals

    return document(
        trace.info.to_dict(), totals(trace), windows=trace.windows, capture=trace.capture_totals
    )


def document(
    info: Mapping[str, Any],
    totals: Mapping[str, Any],
    *,
    windows: Iterable[tuple[int, int]] | None = None,
    capture: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Put metadata and totals into the JSON contract; see :func:`summary`.

    Parameters
    ----------
    info : mapping
        :meth:`nsan.info.TraceInfo.to_dict`.
    totals : mapping
        :func:`nsan.totals.totals` of the trace, whole or filtered.
    windows : iterable of (int, int), optional
        The windows of time of a filter, ns.
    capture : mapping, optional
        Totals of the whole capture, which health is about; ``totals`` by default.

    Returns
    -------
    dict
        The JSON contract.
    """
    capture = capture or totals
    answers = {kind: info["capture"][kind]["answer"] for kind in CAPTURE_KINDS}
    return {
        "schema": SCHEMA,
        "nsan_version": nsan.__version__,
        "source": info["source"],
        "source_kind": info["kind"],
        "nsys_version": info["nsys_version"],
        "export_schema": info["export_schema"],
        "driver_version": info["driver_version"],
        "cuda_driver_version": info["cuda_driver_version"],
        "cpu": info["cpu"],
        "session_start_utc_ns": info["session_start_utc_ns"],
        "coherent_platform": is_coherent(capture) is not None,
        "capture": answers,
        "switches": {kind: info["capture"][kind]["switch"] for kind in CAPTURE_KINDS},
        "reasons": {kind: info["capture"][kind]["reason"] for kind in CAPTURE_KINDS},
        "windows_ns": None if windows is None else [list(window) for window in windows],
        "devices": [dict(device) for device in totals["devices"]],
        "processes": [dict(process) for process in totals["processes"]],
        "first_ns": totals["span"]["first_ns"],
        "last_ns": totals["span"]["last_ns"],
        "duration_ns": totals["span"]["duration_ns"],
        "gpu_faults": _gpu_faults(answers["gpu_faults"], totals["gpu_faults"]),
        "cpu_faults": _cpu_faults(answers["cpu_faults"], totals["cpu_faults"]),
        "migrations": _migrations(answers["migrations"], totals["migrations"]),
        "kernels": _kernels(answers["kernels"], totals["kernels"]),
        "driver_events": dict(totals["driver_events"]) if info["kind"] in NVPROF_KINDS else None,
        "managed": _managed(answers["allocations"], totals["managed"]),
        "health": [asdict(check) for check in checks(info, capture)],
        "kinds": dict(_KINDS),
    }


_KINDS: Final = {
    "gpu_faults": "recorded",
    "cpu_faults": "recorded",
    "migrations": "recorded",
    "busy_ns": "derived",
    "bytes_per_s": "derived",
    "n_addresses": "derived",
    "n_va_blocks": "derived",
    "duration_ns": "derived",
}
"""What kind of number each figure is (design 5): a sum of rows, or exact arithmetic on rows."""


def has_um_data(info: Mapping[str, Any], totals: Mapping[str, Any]) -> bool:
    """Say whether a trace has any migration, fault or managed allocation, or may have."""
    if "span" in info["doubtful"] or "managed_allocations" in info["doubtful"]:
        return True  # rows that could not be told apart may be some
    counts, managed = totals["counts"], totals["managed"]
    return bool(
        counts["migrations"]
        or counts["gpu_faults"]
        or counts["cpu_faults"]
        or managed["n_managed_allocations"]
        or managed["n_managed_calls"]
    )


def total(values: Iterable[int | None]) -> int | None:
    """Add up, or None if a part is unknown."""
    found = list(values)
    return None if any(value is None for value in found) else sum(v for v in found if v is not None)


def _group_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    hexed = ("min_va", "max_va")
    return [{k: format_address(v) if k in hexed else v for k, v in row.items()} for row in rows]


def _by(rows: Iterable[Mapping[str, Any]], key: str, figures: Iterable[str]) -> dict[str, Any]:
    rows = list(rows)
    names = dict.fromkeys(row[key] for row in rows)
    return {
        name: {figure: total(row[figure] for row in rows if row[key] == name) for figure in figures}
        for name in names
    }


def _gpu_faults(answer: str, faults: Mapping[str, Any]) -> dict[str, Any]:
    if answer != "recorded":
        names = (
            "n_rows",
            "n_page_faults",
            "n_addresses",
            "n_va_blocks",
            "busy_ns",
            "by_access",
            "groups",
        )
        return dict.fromkeys(names)
    rows = faults["groups"]
    return {
        "n_rows": total(row["n_rows"] for row in rows),
        "n_page_faults": total(row["n_page_faults"] for row in rows),
        "n_addresses": faults["n_addresses"],
        "n_va_blocks": faults["n_va_blocks"],
        "busy_ns": faults["busy_ns"],
        "by_access": _by(rows, "access", ("n_rows", "n_page_faults")),
        "groups": _group_rows(rows),
    }


def _cpu_faults(answer: str, faults: Mapping[str, Any]) -> dict[str, Any]:
    if answer != "recorded":
        return dict.fromkeys(("n", "n_addresses", "n_va_blocks", "groups"))
    return {
        "n": total(row["n_rows"] for row in faults["groups"]),
        "n_addresses": faults["n_addresses"],
        "n_va_blocks": faults["n_va_blocks"],
        "groups": _group_rows(faults["groups"]),
    }


def _migrations(answer: str, migrations: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "n",
        "bytes",
        "htod_bytes",
        "dtoh_bytes",
        "dtod_bytes",
        "by_cause",
        "busy_ns",
        "min_va",
        "max_va",
        "groups",
    )
    if answer != "recorded":
        return dict.fromkeys(names)
    rows = [_with_rate(row) for row in migrations["groups"]]
    lows, highs = [row["min_va"] for row in rows], [row["max_va"] for row in rows]
    placed = bool(rows) and None not in lows
    return {
        "n": total(row["n"] for row in rows),
        "bytes": total(row["bytes"] for row in rows),
        **{
            f"{way}_bytes": total(row["bytes"] for row in rows if row["direction"] == way)
            for way in ("htod", "dtoh", "dtod")
        },
        "by_cause": _by(rows, "cause", ("n", "bytes")),
        "busy_ns": migrations["busy_ns"],
        "min_va": format_address(min(lows)) if placed else None,
        "max_va": format_address(max(highs)) if placed else None,
        "groups": _group_rows(rows),
    }


def _with_rate(group: Mapping[str, Any]) -> dict[str, Any]:
    """Add the rate; none where a window cuts the time of a migration, whose bytes it cannot cut."""
    row = dict(group)
    is_cut = row.pop("is_cut", False)
    return row | {"bytes_per_s": None if is_cut else rate(row["bytes"], row["busy_ns"])}


def rate(n_bytes: int | None, busy_ns: int | None) -> float | None:
    """Bytes per second of busy time; None where either is unknown or no time passed."""
    return n_bytes / busy_ns * NS_PER_S if n_bytes is not None and busy_ns else None


def _kernels(answer: str, kernels: Mapping[str, Any]) -> dict[str, Any]:
    names = ("n", "n_graph_launches", "busy_ns")
    return {name: kernels[name] if answer == "recorded" else None for name in names}


def _managed(answer: str, managed: Mapping[str, Any]) -> dict[str, Any]:
    recorded = answer == "recorded"
    return {
        "n_allocations": managed["n_managed_allocations"] if recorded else None,
        "bytes": managed["managed_bytes"] if recorded else None,
        "n_calls": managed["n_managed_calls"],
    }
