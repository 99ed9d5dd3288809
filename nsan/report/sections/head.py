"""The first lines of a report: of what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from nsan.health import NVPROF_KINDS
from nsan.info import MODEL_KIND, MODELLED
from nsan.reading import launched
from nsan.report.blocks import Block, Point, Points, Text, quoted
from nsan.report.shown import Blocks
from nsan.tabular.notes import few
from nsan.text import safe
from nsan.units import format_bytes, format_time

if TYPE_CHECKING:
    from nsan.report.report import Report

_MOST: Final = 4
"""Kinds of GPUs, and processes, that are named."""


def write(report: Report) -> Blocks:
    """Write the first lines of a report."""
    document = report.summary
    blocks: list[Block] = [Points(tuple(_points(document)))]
    if document["source_kind"] == MODEL_KIND:
        said = f"The capture was {MODELLED}: every figure is the model's."
        blocks.append(Text(said, "warning"))
    if report.is_part:
        said = f"Only a part of the capture: {filters_in_words(report.filters)}."
        blocks.append(Text(said, "warning"))
    return Blocks(blocks)


def _points(document: Mapping[str, Any]) -> Iterator[Point]:
    yield Point("Trace:", f"{quoted(document['source'])}, {profiler_in_words(document)}")
    if document["devices"]:
        yield Point("GPU:", few(_gpus(document["devices"]), _MOST))
    if document["processes"]:
        named = (
            f"{each['pid']}" + f" ({quoted(each['name'], 40)})" * bool(each["name"])
            for each in document["processes"]
        )
        yield Point("Process:", few(named, _MOST))
    yield from _ran(document)


def profiler_in_words(document: Mapping[str, Any]) -> str:
    """Say what recorded a capture.

    Parameters
    ----------
    document : mapping
        :func:`nsan.contract.summary`.

    Returns
    -------
    str
        Profiler with its version and the driver's, as far as they are known.
    """
    if document["source_kind"] == MODEL_KIND:
        return f"modelled ({safe(document['driver_version'])})"
    if document["source_kind"] in NVPROF_KINDS:
        words = ["recorded by nvprof or the Visual Profiler"]
    else:
        words = [f"recorded by nsys {safe(document['nsys_version'] or 'of unknown version')}"]
    if document["driver_version"]:
        words.append(f"driver {safe(document['driver_version'])}")
    return ", ".join(words)


def _gpus(devices: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name GPUs, those that are alike once; two processes may each have a row for one GPU."""
    alike: dict[tuple[str | None, int | None], set[Any]] = {}
    for each in devices:
        known = each["gpu_id"] if each["gpu_id"] is not None else f"ordinal {each['device_id']}"
        alike.setdefault((each["name"], each["total_memory_bytes"]), set()).add(known)
    return [_gpu(name, memory, len(found)) for (name, memory), found in alike.items()]


def _gpu(name: str | None, memory: int | None, n: int) -> str:
    size = f", {format_bytes(memory)}" + " each" * (n > 1) if memory else ""
    if not name:
        return f"{n} GPUs, " * (n > 1) + "not described in the capture" + size
    return f"{n} x " * (n > 1) + quoted(name) + size


def _ran(document: Mapping[str, Any]) -> Iterator[Point]:
    kernels, parts = document["kernels"], []
    if document["duration_ns"] is not None:
        parts.append(f"{format_time(document['duration_ns'])} from first start to last end")
    if kernels["n"] is not None:
        ran = launched(document)
        # What started before a part may run in it.
        is_cut = document["windows_ns"] is not None
        ran += " started in this part" * is_cut
        if kernels["busy_ns"]:
            busy = ", and kernels ran for" if is_cut else ", busy"
            ran += f"{busy} {format_time(kernels['busy_ns'])}"
        parts.append(ran)
    derived = document["duration_ns"] is not None or kernels["busy_ns"]
    kind = "modelled" if document["source_kind"] == MODEL_KIND else "derived"
    if parts:
        yield Point("Time:", "; ".join(parts), kind if derived else "recorded")


def filters_in_words(filters: Mapping[str, Any]) -> str:
    """Say which part of a capture filters keep.

    Parameters
    ----------
    filters : mapping
        Of a report.

    Returns
    -------
    str
        A clause; a name in it is quoted.

    Examples
    --------
    >>> filters_in_words({"time": "1s/2s", "device": [0, 1]})
    'rows that start in `1s/2s`, of GPU 0 and 1'
    """
    parts = []
    if "time" in filters:
        parts.append(f"rows that start in {quoted(filters['time'])}")
    if "nvtx" in filters:
        parts.append(f"rows that start in the NVTX range {quoted(filters['nvtx'])}")
    for key, word in (("device", "GPU"), ("pid", "process")):
        if key in filters:
            parts.append(f"of {word} {' and '.join(map(safe, several(filters[key])))}")
    return ", ".join(parts)


def several(value: Any) -> Iterable[Any]:
    """Give the values of a filter, one or several.

    Examples
    --------
    >>> list(several(0)), list(several([0, 1]))
    ([0], [0, 1])
    """
    return value if isinstance(value, list | tuple | set) else [value]
