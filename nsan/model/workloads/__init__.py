"""Programs by name: what users pick on the command line, and what sample_data is made of.

A workload turns a few sizes into a program; the driver and the machine are set apart from it
(:class:`nsan.model.settings.Settings`).
"""

from __future__ import annotations

from typing import Final

from nsan.errors import ProgramError, UnknownNameError
from nsan.model.networks import NETWORKS as _NETWORKS
from nsan.model.networks import SMALL, Trainable
from nsan.model.size import Workload
from nsan.model.workloads.patterns import PATTERNS

WORKLOADS: Final[dict[str, Workload]] = {each.name: each for each in PATTERNS}
"""Small programs by name."""

NETWORKS: Final[dict[str, Trainable]] = {each.name: each for each in (*_NETWORKS, *SMALL)}
"""Networks to train, by name."""


def workload(name: str) -> Workload:
    """Find a small program by name.

    Raises
    ------
    UnknownNameError
        If there is none of that name; the error lists those there are.
    """
    if name not in WORKLOADS:
        raise UnknownNameError("workload", name, sorted((*WORKLOADS, *NETWORKS)))
    return WORKLOADS[name]


def network(name: str) -> Trainable:
    """Find a network by name.

    Raises
    ------
    ProgramError, UnknownNameError
        If the name is that of a small program, or of none.
    """
    if name in WORKLOADS:
        raise ProgramError(f"{name!r} trains no network", f"Take one of {', '.join(NETWORKS)}")
    if name not in NETWORKS:
        raise UnknownNameError("network", name, sorted(NETWORKS))
    return NETWORKS[name]
