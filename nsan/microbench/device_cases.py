"""What a device check records: a moment of each access pattern, and two training steps of a small network.

Sizes are chosen for small traces. A migration is about 90 B in an export and a fault row 60 B, so that 16 MiB of which
each 4 KiB page moves by itself, there and back, are 0.7 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, cast

from nsan.microbench.tapes import tape_text
from nsan.model.workloads import network
from nsan.units import MIB

TAPE: Final = "tapes/resnet-8.tape"
"""Where the tape of the network lies in the archive; the programs run in its folder."""

_NETWORK: Final = "resnet-8"
_STEPS: Final = 2
"""The first brings the weights and makes the optimizer's state; the second is as all others."""

_SEGMENT_SLACK: Final = 2
"""A caching allocator reserves whole segments: twice what tensors need is enough for one so small."""


@dataclass(frozen=True)
class Case:
    """One program with its flags, recorded once.

    Attributes
    ----------
    name : str
        Of its files.
    program : str
        ``uvm_bench`` or ``dl_bench``.
    footprint_mib : int
        Managed memory that it has at most, MiB.
    flags : tuple of str
        For the program; without blanks.
    oversubscribes : bool, default False
        It leaves less GPU memory free than it needs, and is run only if asked for.
    """

    name: str
    program: str
    footprint_mib: int
    flags: tuple[str, ...]
    oversubscribes: bool = False

    @property
    def line(self) -> str:
        """The case as a line of ``cases.tsv``."""
        over = "yes" if self.oversubscribes else "no"
        fields = (self.name, self.program, str(self.footprint_mib), over, " ".join(self.flags))
        return "\t".join(fields) + "\n"


def cases() -> list[Case]:
    """List what a check records, in order; what oversubscribes comes last.

    Returns
    -------
    list of Case
        Each with a name of its own.
    """
    return [*_patterns(), *_steps(), _oversubscribed()]


def tape() -> str:
    """Write the tape of the network: training steps as ``dl_bench`` plays them."""
    return tape_text(network(_NETWORK).build(steps=_STEPS))


def _patterns() -> Iterator[Case]:
    sizes = {
        "signature": (8, 1),
        "vector-add": (12, 2),
        "stream": (48, 2),
        "random": (16, 2),
        "ping-pong": (4, 8),
        "first-touch": (32, 2),
        "hotspot": (12, 2),
    }
    for pattern, (mib, iterations) in sizes.items():
        yield _pattern(pattern, pattern, mib, ("--iterations", str(iterations)))


def _pattern(
    name: str, pattern: str, mib: int, flags: tuple[str, ...], *, oversubscribes: bool = False
) -> Case:
    own = ("--pattern", pattern, "--bytes", f"{mib}MiB", *flags)
    return Case(name, "uvm_bench", mib, own, oversubscribes)


def _steps() -> Iterator[Case]:
    peak_bytes = cast("int", network(_NETWORK).build(steps=_STEPS).facts["peak_bytes"])
    mib = _SEGMENT_SLACK * -(-peak_bytes // MIB)
    for allocator in ("raw", "caching"):
        flags = ("--tape", TAPE, "--allocator", allocator)
        yield Case(f"{_NETWORK}-{allocator}", "dl_bench", mib, flags)


def _oversubscribed() -> Case:
    flags = (
        *("--iterations", "2", "--oversubscription-factor", "1.25"),
        "--allow-oversubscription",
    )
    return _pattern("stream-oversubscribed", "stream", 192, flags, oversubscribes=True)
