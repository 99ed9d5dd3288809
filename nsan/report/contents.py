"""The contents of a report: its sections, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nsan.errors import UnknownNameError
from nsan.report.blocks import Block
from nsan.report.sections import (
    advice,
    allocator,
    batches,
    clusters,
    memory,
    ping_pong,
    places,
    provenance,
    recorded,
    steps,
    traffic,
    transfers,
    verdict,
)

if TYPE_CHECKING:
    from nsan.report.report import Report


@dataclass(frozen=True)
class Section:
    """A section: its heading in the shipped notebook, and the function that writes it."""

    title: str
    write: Callable[[Report], Iterable[Block]]
    needs_events: bool = True
    """Of a trace without any Unified Memory event it has nothing to say."""


SECTIONS: Final = {
    "recorded": Section("What was recorded", recorded.write, needs_events=False),
    "verdict": Section("The verdict", verdict.write, needs_events=False),
    "advice": Section("What would help", advice.write),
    "traffic": Section("What moved, when and why", traffic.write),
    "places": Section("Where: kernels, NVTX ranges, allocations", places.write),
    "clusters": Section("Fault clusters", clusters.write),
    "batches": Section("Batches and their latency", batches.write),
    "memory": Section("Refaults and oversubscription", memory.write),
    "ping_pong": Section("Ping-pong", ping_pong.write),
    "transfers": Section("How efficient the transfers were", transfers.write),
    "steps": Section("Step by step", steps.write),
    "allocator": Section("PyTorch's caching allocator", allocator.write, needs_events=False),
    "provenance": Section("Where these figures come from", provenance.write, needs_events=False),
}
"""Sections by name, in the order of the report."""


def find_section(name: str) -> Section:
    """Find a section by its name.

    Parameters
    ----------
    name : str
        Its name.

    Returns
    -------
    Section
        The section.

    Raises
    ------
    UnknownNameError
        If there is none.
    """
    if name not in SECTIONS:
        raise UnknownNameError("section", name, SECTIONS)
    return SECTIONS[name]
