"""What can go wrong with the microbenchmark, in words that carry the way out; see :mod:`nsan.errors`."""

from __future__ import annotations

from collections.abc import Sequence

from nsan.errors import NsanError


class NvccNotFoundError(NsanError):
    """There is no CUDA compiler; ``named`` is what the user named, if that is not one."""

    def __init__(self, named: str | None = None) -> None:
        self.named = named
        found = (
            "nvcc, which compiles the benchmark, is not found: not by --nvcc or NVCC, not on PATH, not in "
            "CUDA_HOME, not in /usr/local/cuda/bin."
            if named is None
            else f"{named!r} is no program that can be run, and was named as nvcc."
        )
        super().__init__(
            f"{found}\nInstall the CUDA toolkit (11.8 or later; its compiler is enough, and needs no GPU), name "
            "its nvcc with --nvcc PATH or NVCC, or build on another machine and give the program with --program PATH."
        )


class BuildFailedError(NsanError):
    """nvcc did not compile a program; ``lines`` are the first that say why."""

    def __init__(self, program: str, status: int, lines: Sequence[str], advice: str) -> None:
        self.program, self.status, self.lines = program, status, tuple(lines)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        said = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
        super().__init__(
            f"nvcc did not compile {program} and {how}. It says:\n{said}\n{advice} Nothing half-built is left."
        )


class BenchEndedError(NsanError):
    """A program ended for a reason that lies in the machine or the command line; nothing is left of the run.

    ``exit_code`` is the program's own.
    """

    def __init__(self, program: str, status: int, reason: str) -> None:
        self.program, self.reason = program, reason
        self.exit_code = status
        super().__init__(f"{program} did not run: {reason}. Nothing was written.")
