"""A managed-memory program in a few typed words: what the host does, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nsan.model.access import Access

CPU: Final = -1
"""The host, where a device is named."""

ALLOCATION_NS: Final = 60_000
"""What ``cudaMallocManaged``, ``cudaMalloc`` or ``cudaFree`` takes the host, waits aside."""


@dataclass(frozen=True)
class Allocate:
    """``cudaMallocManaged`` of ``n_bytes`` under a name."""

    name: str
    n_bytes: int


@dataclass(frozen=True)
class Free:
    """``cudaFree`` of a managed allocation or of a device one."""

    name: str


@dataclass(frozen=True)
class DeviceAllocate:
    """``cudaMalloc``: memory that managed pages of this device can no longer have."""

    name: str
    n_bytes: int
    device: int = 0


@dataclass(frozen=True)
class HostTouch:
    """The host thread goes through an allocation, page by page.

    Attributes
    ----------
    allocation : str
        Name of a managed allocation.
    write : bool, default False
        Stores.
    offset_bytes, n_bytes : int
        The part; by default all of it.
    ns_per_mib : float, default 100_000
        The program's own time.
    """

    allocation: str
    write: bool = False
    offset_bytes: int = 0
    n_bytes: int | None = None
    ns_per_mib: float = 100_000.0


@dataclass(frozen=True)
class HostWait:
    """The host does something else for ``ns``."""

    ns: int


@dataclass(frozen=True)
class Prefetch:
    """``cudaMemPrefetchAsync`` of a part of an allocation to a device, or to ``CPU``."""

    allocation: str
    device: int = 0
    offset_bytes: int = 0
    n_bytes: int | None = None


@dataclass(frozen=True)
class Advise:
    """``cudaMemAdvise``.

    Only memory at the CPU is mapped from afar here: a preferred location or accessed-by never makes a
    GPU use another GPU's memory in place, and a first touch goes to the preferred location only if that
    is the CPU or the GPU that touches.

    A GPU that uses memory of the CPU in place (because of this advice, or because the driver has pinned
    the page against thrashing) moves the sectors of 32 byte that it touches over its link, each time anew:
    nothing of them is cached. Assumed, as no capture shows it: all its thread blocks share the measured
    rate of its copies in that direction (``GpuProfile.htod`` and ``dtoh``), each access takes 1 us more
    (``REMOTE_LATENCY_NS``), and migrations go on beside it undisturbed. The link is that of PCIe: on
    coherent machines kernels reach more than the copy engines (GB10: 198 against 59 GB/s).

    Attributes
    ----------
    allocation : str
        Name of a managed allocation.
    advice : str
        "read_mostly", "preferred_location" or "accessed_by"; with "unset_" before to take it back.
    device : int, default 0
        A GPU, or ``CPU``; means nothing to read_mostly.
    offset_bytes, n_bytes : int
        The part; by default all of it.
    """

    allocation: str
    advice: str
    device: int = 0
    offset_bytes: int = 0
    n_bytes: int | None = None


@dataclass(frozen=True)
class Discard:
    """The pages that lie wholly in a part of an allocation are given up: their contents are lost.

    They are resident nowhere afterwards, without a copy, and the next touch is a first touch. What was
    advised for them stays. The real call, ``cudaMemDiscardBatchAsync`` of CUDA 13, is put into a stream;
    here the call waits for the device and costs what ``cudaFree`` costs, because it stands for the
    cudaFree of a tensor without a cache. So a block of 2 MiB that is given up wholly is as new to the driver
    (its next service costs what a first one does), and a part without a whole page costs the same call.

    Attributes
    ----------
    allocation : str
        Name of a managed allocation.
    offset_bytes, n_bytes : int
        The part; by default all of it.
    """

    allocation: str
    offset_bytes: int = 0
    n_bytes: int | None = None


@dataclass(frozen=True)
class MarkDead:
    """From here on in a GPU's stream, nobody needs the contents of pages, or somebody does again.

    An oracle that no driver has: it takes no time and leaves no row. Dead pages are dropped instead
    of copied: those at the CPU when the mark is reached, those at a GPU when they are evicted, and any when
    they would be copied elsewhere; a fault on what was dropped is a first touch. The mark keeps the order of
    the stream: kernels launched before it find their data. The host must not touch the pages
    before the stream has come to a mark that makes them alive.

    Attributes
    ----------
    allocation : str
        Name of a managed allocation.
    offset_bytes, n_bytes : int
        The part; by default all of it. Pages wholly in it become dead; those that it meets, alive.
    dead : bool, default True
        False: alive again.
    device : int, default 0
        Whose stream.
    """

    allocation: str
    offset_bytes: int = 0
    n_bytes: int | None = None
    dead: bool = True
    device: int = 0


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    Attributes
    ----------
    name : str
        Name, as a trace shows it.
    grid, threads : int
        Thread blocks, and threads in each.
    streams : tuple of Access
        What it touches.
    compute_ns_per_mib : float, default 200_000
        What one thread block computes per MiB of all its streams, where each thread handles 4 byte of
        each per step (0.20 to 0.36 ms measured for 256 threads, 12.1 ms for one).
    repeat : int, default 1
        Sweeps over the streams.
    """

    name: str
    grid: int
    threads: int
    streams: tuple[Access, ...]
    compute_ns_per_mib: float = 200_000.0
    repeat: int = 1


@dataclass(frozen=True)
class Launch:
    """Start a kernel; the host goes on."""

    kernel: Kernel
    device: int = 0


@dataclass(frozen=True)
class Copy:
    """``cudaMemcpy`` between a managed allocation and other memory, on the copy engine of a device.

    Attributes
    ----------
    allocation : str
        Name of a managed allocation.
    to_managed : bool, default True
        Writes it; else reads it.
    device : int, default 0
        Device whose copy engine works.
    offset_bytes, n_bytes : int
        The part; by default all of it.
    """

    allocation: str
    to_managed: bool = True
    device: int = 0
    offset_bytes: int = 0
    n_bytes: int | None = None


@dataclass(frozen=True)
class Fill:
    """``cudaMemset`` of a managed allocation on a device."""

    allocation: str
    device: int = 0
    n_bytes: int | None = None


@dataclass(frozen=True)
class Synchronize:
    """``cudaDeviceSynchronize``: wait for all work of all devices."""


@dataclass(frozen=True)
class PushRange:
    """``nvtxRangePush``."""

    text: str


@dataclass(frozen=True)
class PopRange:
    """``nvtxRangePop``."""


@dataclass(frozen=True)
class Mark:
    """``nvtxMark``, for example at the start of a step."""

    text: str


Operation = (
    Allocate
    | Free
    | DeviceAllocate
    | HostTouch
    | HostWait
    | Prefetch
    | Advise
    | Discard
    | MarkDead
    | Launch
    | Copy
    | Fill
    | Synchronize
    | PushRange
    | PopRange
    | Mark
)


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes
    ----------
    name : str
        Name, as a trace shows it.
    operations : tuple
        What the host does, in order.
    descending : bool, default False
        Later allocations lie lower in address space, as arrays of 256 MiB and more do in the
        captures; those up to 16 MiB lie higher.
    """

    name: str
    operations: tuple[Operation, ...] = field(default=())
    descending: bool = False
