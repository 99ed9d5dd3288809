"""The figures of a summary as sentences: what moved, which way, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsan.units import counted, format_bytes, format_time


def reading(document: Mapping[str, Any]) -> list[str]:
    """Say what a summary means.

    Parameters
    ----------
    document : mapping
        :func:`nsan.contract.summary`.

    Returns
    -------
    list of str
        Sentences, the most telling first. Each is a sum of rows or exact arithmetic on rows.
    """
    migrations = document["migrations"]
    if not migrations["n"]:
        return []
    moved = _bytes_by(migrations["groups"])
    if moved is None:
        return []
    return [
        *_to_gpu(moved),
        *_to_cpu(moved),
        *_between(moved),
        *_unexplained(moved),
        *_busy(document),
    ]


def _bytes_by(groups: list[Mapping[str, Any]]) -> dict[tuple[str, str], int] | None:
    moved: dict[tuple[str, str], int] = {}
    for row in groups:
        if row["bytes"] is None:
            return None
        key = (row["direction"], row["cause"])
        moved[key] = moved.get(key, 0) + row["bytes"]
    return moved


def _to_gpu(moved: Mapping[tuple[str, str], int]) -> list[str]:
    faulted, ahead = moved.get(("htod", "coherence"), 0), moved.get(("htod", "prefetch"), 0)
    said = []
    if faulted + ahead:
        share = f"{ahead / (faulted + ahead):.1%}"
        said.append(
            f"{format_bytes(faulted + ahead)} went to the GPU because it touched absent pages; "
            f"the driver's prefetcher brought {share} of that."
        )
    if user := moved.get(("htod", "user"), 0):
        said.append(f"{format_bytes(user)} went to the GPU because the program asked for it.")
    if counted := moved.get(("htod", "access_counters"), 0):
        said.append(
            f"{format_bytes(counted)} went to the GPU because access counters called for it."
        )
    return said


def _to_cpu(moved: Mapping[tuple[str, str], int]) -> list[str]:
    said = []
    if evicted := moved.get(("dtoh", "eviction"), 0):
        said.append(
            f"{format_bytes(evicted)} were evicted to the CPU: GPU memory was full (oversubscribed)."
        )
    if faulted := moved.get(("dtoh", "coherence"), 0) + moved.get(("dtoh", "prefetch"), 0):
        said.append(f"{format_bytes(faulted)} went back because the CPU touched it.")
    if user := moved.get(("dtoh", "user"), 0):
        said.append(f"{format_bytes(user)} went back because the program asked for it.")
    return said


def _unexplained(moved: Mapping[tuple[str, str], int]) -> list[str]:
    there, back = moved.get(("htod", "unknown"), 0), moved.get(("dtoh", "unknown"), 0)
    if not there and not back:
        return []
    ways = f"{format_bytes(there)} went to the GPU and {format_bytes(back)} came back"
    return [f"{ways} for reasons that the recording does not tell."]


def _between(moved: Mapping[tuple[str, str], int]) -> list[str]:
    between = sum(size for (direction, _), size in moved.items() if direction == "dtod")
    return [f"{format_bytes(between)} moved between GPUs."] if between else []


def n_gpus(document: Mapping[str, Any]) -> int:
    """Count the GPUs of a summary: two processes may each call another one their device 0.

    Parameters
    ----------
    document : mapping
        :func:`nsan.contract.summary`.

    Returns
    -------
    int
        GPUs that differ, as far as the recording tells.
    """
    return len({_gpu(device) for device in document["devices"]})


def _gpu(device: Mapping[str, Any]) -> tuple[str, int]:
    if device["gpu_id"] is not None:
        return "gpu", device["gpu_id"]
    return "ordinal", device["device_id"]


def launched(document: Mapping[str, Any]) -> str:
    """Count what ran on GPUs; its kernels were recorded.

    Parameters
    ----------
    document : mapping
        :func:`nsan.contract.summary`.

    Returns
    -------
    str
        Kernels, and launches of graphs where there are any.
    """
    kernels = document["kernels"]
    ran = counted(kernels["n"], "kernel")
    if kernels["n_graph_launches"]:
        ran += f" and {counted(kernels['n_graph_launches'], 'graph launch', 'graph launches')}"
    return ran


def in_flight(document: Mapping[str, Any]) -> str:
    """Say for how long migrations were in flight, a derived figure.

    Parameters
    ----------
    document : mapping
        :func:`nsan.contract.summary`.

    Returns
    -------
    str
        The sentence without its full stop; empty for a part of a capture, or where it is not known.
    """
    busy, span = document["migrations"]["busy_ns"], document["duration_ns"]
    if not busy or not span or document["windows_ns"] is not None:
        return ""
    n = max(n_gpus(document), 1)
    of = "of the capture" if n == 1 else f"of GPU time in the capture ({n} GPUs)"
    return f"Migrations were in flight for {format_time(busy)}, {busy / (span * n):.1%} {of}"


def _busy(document: Mapping[str, Any]) -> list[str]:
    said = in_flight(document)
    return [f"{said} (derived)."] if said else []
