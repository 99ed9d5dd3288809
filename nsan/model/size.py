"""What a workload is asked to do, and what it is: the words that the command line and samples share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from nsan.errors import ProgramError, UnknownNameError
from nsan.model.program import Program
from nsan.units import MIB

PREFETCHES: Final = ("none", "ahead", "late", "back")


@dataclass(frozen=True)
class Size:
    """What a workload is asked to do.

    Attributes
    ----------
    n_bytes : int
        Managed memory of the program, all arrays together.
    iterations : int
        Steps of the program, where it has steps.
    prefetch : str
        "none", "ahead" (to the GPU before the kernel), "late" (after the launch) or "back" (also to
        the CPU before it reads).
    n_gpus : int
        GPUs that take part.
    seed : int
        Of random accesses.
    """

    n_bytes: int = 64 * MIB
    iterations: int = 1
    prefetch: str = "none"
    n_gpus: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what no workload can do."""
        if min(self.n_bytes, self.iterations, self.n_gpus) < 1:
            raise ProgramError("A size, a number of steps or of GPUs below 1", "Take 1 or more")
        if self.prefetch not in PREFETCHES:
            raise UnknownNameError("kind of prefetch", self.prefetch, PREFETCHES)


_LEAST_BYTES: Final = 4096


@dataclass(frozen=True)
class Workload:
    """A program by name: what it shows, how to make it, and which sizes mean something to it."""

    name: str
    description: str
    make: Callable[[Size], Program]
    has_steps: bool = True
    has_prefetch: bool = True
    gpus: int = 1

    def build(self, size: Size) -> Program:
        """Make the program.

        Raises
        ------
        ProgramError
            If something is asked for that this workload does not have, or it is too small.
        """
        asked = {
            "steps": size.iterations > 1 and not self.has_steps,
            "prefetches": size.prefetch != "none" and not self.has_prefetch,
            "further GPUs": size.n_gpus > 1 and self.gpus == 1,
        }
        for what, in_vain in asked.items():
            if in_vain:
                raise ProgramError(f"The workload {self.name!r} has no {what}", "Leave that out")
        if size.n_bytes < _LEAST_BYTES:
            raise ProgramError(
                f"{size.n_bytes} byte for the workload {self.name!r}",
                f"Take {_LEAST_BYTES} or more",
            )
        return self.make(size)
