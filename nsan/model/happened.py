"""What a run of the modelled machine leaves: plain records, before anybody writes a trace of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nsan.model.program import Kernel

if TYPE_CHECKING:
    import polars as pl

KERNEL: Final = "kernel"
COPY: Final = "copy"
FILL: Final = "fill"
PREFETCH: Final = "prefetch"
MARK_DEAD: Final = "mark dead"


@dataclass
class Work:
    """Something in a GPU's stream.

    Attributes
    ----------
    kind : str
        "kernel", "copy", "fill", "prefetch" or "mark dead".
    name : str
        Of the kernel, or of the call.
    ready_ns, start_ns, end_ns : int
        Put into the stream; begun; done.
    correlation : int
        Its API call.
    kernel : Kernel, optional
        What runs; copies and fills run as one thread block.
    destination, pages : int, (int, int)
        Of a prefetch: processor, and half-open range of pages; a mark has pages too.
    dead : bool
        Of a mark.
    operation : int
        Place in the program of the operation that put it there.
    n_bytes, copy_kind : int
        Of a copy or fill.
    """

    kind: str
    name: str
    ready_ns: int
    correlation: int
    kernel: Kernel | None = None
    destination: int = 0
    pages: tuple[int, int] = (0, 0)
    n_bytes: int = 0
    copy_kind: int = 0
    dead: bool = False
    operation: int = -1
    start_ns: int = 0
    end_ns: int = 0


@dataclass(frozen=True)
class Call:
    """One API call."""

    name: str
    start_ns: int
    end_ns: int
    correlation: int


@dataclass
class Life:
    """One allocation over time; ``device`` is None for managed memory."""

    name: str
    start: int
    n_bytes: int
    alloc_ns: int
    correlation: int
    device: int | None = None
    free_ns: int | None = None


@dataclass
class Region:
    """One NVTX range, or a mark."""

    text: str
    start_ns: int
    end_ns: int
    depth: int
    parent: int | None
    is_mark: bool = False
    closed: bool = False


@dataclass
class Happened:
    """All that a run left; times in ns, pages by number.

    Attributes
    ----------
    log : dict of str to DataFrame
        The engine's tables, columns as in ``LOG_COLUMNS``, in the order in which things were done.
    work : list of (int, Work)
        Kernels, copies and fills with their GPU, in the order in which they began.
    calls, lives, regions : list
        API calls, allocations, NVTX ranges and marks.
    operation_ns : list of int
        When the host was done with each operation of the program.
    operation_copies : list of int
        Rows of the log's copies when the host was done with each operation.
    prefetch_copies : list of (int, int, int)
        Operation, first row and end of the copies of each user's prefetch, in order.
    end_ns : int
        When all was done.
    """

    log: dict[str, pl.DataFrame] = field(default_factory=dict)
    work: list[tuple[int, Work]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    operation_ns: list[int] = field(default_factory=list)
    operation_copies: list[int] = field(default_factory=list)
    prefetch_copies: list[tuple[int, int, int]] = field(default_factory=list)
    end_ns: int = 0
