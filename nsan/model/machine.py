"""Run a program on the modelled machine: what the host thread does, call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nsan.errors import ProgramError
from nsan.model.access import Stream
from nsan.model.engine import state as st
from nsan.model.happened import (
    COPY,
    FILL,
    KERNEL,
    MARK_DEAD,
    PREFETCH,
    Call,
    Happened,
    Life,
    Region,
    Work,
)
from nsan.model.layout import Layout, Place
from nsan.model.program import (
    ALLOCATION_NS,
    CPU,
    Advise,
    Allocate,
    Copy,
    DeviceAllocate,
    Discard,
    Fill,
    Free,
    HostTouch,
    HostWait,
    Kernel,
    Launch,
    Mark,
    MarkDead,
    PopRange,
    Prefetch,
    Program,
    PushRange,
    Synchronize,
)
from nsan.model.settings import Settings
from nsan.model.streams import Streams
from nsan.units import MIB
from nsan.uvm.constants import VA_BLOCK_BYTES

_CALL_NS: Final = 4_000
"""A CUDA call that does not wait."""

_LAUNCH_NS: Final = 6_000
_NVTX_NS: Final = 500
_COPY_NS_PER_MIB: Final = 80_000.0
"""A copy engine's own pace."""

_DEVICE_MEMORY: Final = 1 << 40
"""Where device allocations lie: beyond all managed ones."""

_MOST_NS: Final = 10**15
_PACE: Final = "Take 0 or more, less than 10^15"

_ADVICES: Final = ("read_mostly", "preferred_location", "accessed_by")

Progress = Callable[[int, int], None]


def run(program: Program, settings: Settings, progress: Progress | None = None) -> Happened:
    """Run a program.

    Parameters
    ----------
    program : Program
        What to run.
    settings : Settings
        The machine and its driver.
    progress : callable, optional
        Called with the operations done and the batches served so far.

    Returns
    -------
    Happened
        All that was done, with its times. The same program and settings give the same.

    Raises
    ------
    ProgramError
        If the program does what no program can.
    """
    return _Host(program, settings, progress).run()


class _Host:
    """The host thread of one run."""

    def __init__(self, program: Program, settings: Settings, progress: Progress | None) -> None:
        self._program, self._settings = program, settings
        self._layout = Layout(program.operations, descending=program.descending)
        self._happened = Happened()
        # Not a method of this object: a cycle would keep the engine's arrays until the collector runs.
        done = self._done = [0]
        tell = progress or (lambda _operations, _batches: None)
        self._streams = Streams(
            settings, self._layout.n_bytes, self._happened, lambda batches: tell(done[0], batches)
        )
        self._now = 0
        self._places = iter(self._layout.places)
        self._freed = iter(self._layout.freed)
        self._live: dict[str, tuple[Place, Life]] = {}
        self._open: list[int] = []
        self._correlation = 0
        self._device_bytes = _DEVICE_MEMORY

    def run(self) -> Happened:
        handlers: dict[type, Callable[..., None]] = {
            Allocate: self._allocate,
            Free: self._free,
            DeviceAllocate: self._device_allocate,
            HostTouch: self._touch,
            HostWait: self._host_wait,
            Prefetch: self._prefetch,
            Advise: self._advise,
            Discard: self._discard,
            MarkDead: self._mark_dead,
            Launch: self._launch,
            Copy: self._copy,
            Fill: self._fill,
            Synchronize: self._synchronize,
            PushRange: self._push,
            PopRange: self._pop,
            Mark: self._mark,
        }
        for operation in self._program.operations:
            if type(operation) not in handlers:
                raise ProgramError(f"{operation!r} is no operation", "See nsan.model.program")
            handlers[type(operation)](operation)
            self._done[0] += 1
            self._happened.operation_ns.append(self._now)
            self._happened.operation_copies.append(self._streams.n_copies)
        self._streams.finish()
        self._happened.end_ns = max(self._now, self._streams.free_at)
        for region in self._open:
            self._happened.regions[region].end_ns = self._happened.end_ns
        return self._happened

    def _call(self, name: str, start_ns: int, correlation: int | None = None) -> int:
        """Write down an API call that ends now; give its correlation id."""
        if correlation is None:
            correlation = self._next_correlation()
        self._happened.calls.append(Call(name, start_ns, self._now, correlation))
        return correlation

    def _next_correlation(self) -> int:
        self._correlation += 1
        return self._correlation

    def _spend(self, ns: int) -> int:
        """Let time pass; give when that began."""
        self._now += ns
        return self._now - ns

    # Memory -------------------------------------------------------------------------------------

    def _allocate(self, operation: Allocate) -> None:
        place = next(self._places)
        correlation = self._call("cudaMallocManaged_v6000", self._spend(ALLOCATION_NS))
        self._remember(
            operation.name, Life(place.name, place.start, place.n_bytes, self._now, correlation)
        )

    def _device_allocate(self, operation: DeviceAllocate) -> None:
        gpu = self._gpu(operation.device)
        if operation.n_bytes < 1:
            raise ProgramError(
                f"cudaMalloc of {operation.n_bytes} byte for {operation.name!r}", "Take 1 or more"
            )
        if operation.name in self._live:
            raise ProgramError(f"{operation.name!r} is allocated twice", "Free it, or rename one")
        start = self._spend(ALLOCATION_NS)
        self._streams.catch_up(self._now)
        done = self._streams.take_chunks(gpu, _chunks(operation.n_bytes), self._now)
        if done is None:
            raise ProgramError(
                f"cudaMalloc of {operation.n_bytes} byte for {operation.name!r} fails: GPU {gpu} is full",
                "Ask for less, or raise the capacity",
            )
        self._now = done
        correlation = self._call("cudaMalloc_v3020", start)
        life = Life(
            operation.name, self._device_bytes, operation.n_bytes, self._now, correlation, gpu
        )
        self._device_bytes += _chunks(operation.n_bytes) * VA_BLOCK_BYTES
        self._remember(operation.name, life)

    def _remember(self, name: str, life: Life) -> None:
        self._live[name] = (Place(name, life.start, life.n_bytes), life)
        self._happened.lives.append(life)

    def _free(self, operation: Free) -> None:
        if operation.name not in self._live:
            raise ProgramError(f"Free of {operation.name!r}, which is not allocated", "Allocate it")
        start = self._now
        self._wait_for_all()  # cudaFree waits for the device
        self._spend(ALLOCATION_NS)
        self._call("cudaFree_v3020", start)
        _, life = self._live.pop(operation.name)
        life.free_ns = self._now
        if life.device is not None:
            self._streams.give_chunks(life.device, _chunks(life.n_bytes))
            return
        first, last = next(self._freed)
        size = self._page_bytes
        self._streams.free_pages((first // size, last // size), self._now)

    def _advise(self, operation: Advise) -> None:
        first, last = self._pages(operation.allocation, operation.offset_bytes, operation.n_bytes)
        self._call("cudaMemAdvise_v8000", self._spend(_CALL_NS))
        self._streams.catch_up(self._now)
        memory = self._streams.state.memory
        advice = operation.advice.removeprefix("unset_")
        given = advice == operation.advice
        processor = 0 if operation.device == CPU else self._gpu(operation.device) + 1
        if advice not in _ADVICES:
            raise ProgramError(
                f"There is no advice {operation.advice!r}",
                f"There are {', '.join(_ADVICES)}, each also with unset_ before it",
            )
        if advice == "read_mostly":
            dead = memory.advice[first:last] & int(st.DEAD)
            memory.advice[first:last] = dead | (int(st.READ_MOSTLY) if given else 0)
        elif advice == "preferred_location":
            memory.preferred[first:last] = processor if given else -1
        else:
            bit = 1 << processor
            before = memory.accessed_by[first:last]
            memory.accessed_by[first:last] = before | bit if given else before & (255 - bit)

    def _discard(self, operation: Discard) -> None:
        pages = self._whole_pages(operation.allocation, operation.offset_bytes, operation.n_bytes)
        start = self._now
        self._wait_for_all()
        self._spend(ALLOCATION_NS)
        self._call("cudaMemDiscardBatchAsync", start)
        self._streams.discard(pages, self._now)

    def _mark_dead(self, operation: MarkDead) -> None:
        part = (operation.allocation, operation.offset_bytes, operation.n_bytes)
        work = self._new_work(MARK_DEAD, operation.allocation)
        work.pages = self._whole_pages(*part) if operation.dead else self._pages(*part)
        work.dead = operation.dead
        self._streams.add(self._gpu(operation.device), work, [])

    # The host's own time ------------------------------------------------------------------------

    def _touch(self, operation: HostTouch) -> None:
        pages = self._pages(operation.allocation, operation.offset_bytes, operation.n_bytes)
        if not 0 <= operation.ns_per_mib < _MOST_NS:
            raise ProgramError(f"A touch at {operation.ns_per_mib} ns per MiB", _PACE)
        ns_per_page = int(operation.ns_per_mib * self._page_bytes / MIB)
        self._now = self._streams.touch(pages, ns_per_page, self._now, write=operation.write)

    def _host_wait(self, operation: HostWait) -> None:
        if not 0 <= operation.ns < _MOST_NS:
            raise ProgramError(f"A wait of {operation.ns} ns", _PACE)
        self._spend(operation.ns)

    def _synchronize(self, _: Synchronize) -> None:
        start = self._spend(_CALL_NS)
        self._wait_for_all()
        self._call("cudaDeviceSynchronize_v3020", start)

    def _wait_for_all(self) -> None:
        self._streams.wait(self._streams.is_idle)
        self._now = max(self._now, self._streams.free_at)

    def _push(self, operation: PushRange) -> None:
        parent = self._open[-1] if self._open else None
        start = self._spend(_NVTX_NS)
        region = Region(operation.text, start, start, len(self._open), parent)
        self._open.append(len(self._happened.regions))
        self._happened.regions.append(region)

    def _pop(self, _: PopRange) -> None:
        if not self._open:
            raise ProgramError("A PopRange without a PushRange", "Push a range before")
        region = self._happened.regions[self._open.pop()]
        region.end_ns, region.closed = self._spend(_NVTX_NS), True

    def _mark(self, operation: Mark) -> None:
        start = self._spend(_NVTX_NS)
        self._happened.regions.append(Region(operation.text, start, start, 0, None, is_mark=True))

    # Work for the GPUs --------------------------------------------------------------------------

    def _new_work(
        self, kind: str, name: str, correlation: int = 0, kernel: Kernel | None = None
    ) -> Work:
        """Make work that is ready now, for the operation that the host is at."""
        work = Work(kind, name, self._now, correlation, kernel=kernel)
        work.operation = self._done[0]
        return work

    def _launch(self, operation: Launch) -> None:
        kernel = operation.kernel
        least = min(kernel.grid, kernel.threads, kernel.repeat)
        if not 1 <= len(kernel.streams) <= st.MAX_STREAMS or least < 1:
            raise ProgramError(
                f"Kernel {kernel.name!r} has {len(kernel.streams)} streams, grid {kernel.grid}, "
                f"{kernel.threads} threads and {kernel.repeat} sweeps",
                f"Give it 1 to {st.MAX_STREAMS} streams, and 1 or more of the others",
            )
        if not 0 <= kernel.compute_ns_per_mib < _MOST_NS:
            raise ProgramError(
                f"Kernel {kernel.name!r} computes {kernel.compute_ns_per_mib} ns per MiB", _PACE
            )
        gpu = self._gpu(operation.device)
        correlation = self._call("cudaLaunchKernel_v7000", self._spend(_LAUNCH_NS))
        work = self._new_work(KERNEL, kernel.name, correlation, kernel)
        self._streams.add(gpu, work, [self._place(s.allocation) for s in kernel.streams])

    def _copy(self, operation: Copy) -> None:
        n_bytes = self._size(operation.allocation, operation.n_bytes, operation.offset_bytes)
        stream = Stream(
            allocation=operation.allocation,
            write=operation.to_managed,
            offset_bytes=operation.offset_bytes,
            n_bytes=n_bytes,
        )
        kind = 1 if operation.to_managed else 2
        self._engine_work(COPY, "cudaMemcpy_v3020", operation.device, stream, kind)

    def _fill(self, operation: Fill) -> None:
        n_bytes = self._size(operation.allocation, operation.n_bytes)
        stream = Stream(allocation=operation.allocation, write=True, n_bytes=n_bytes)
        self._engine_work(FILL, "cudaMemset_v3020", operation.device, stream, 0)

    def _engine_work(self, kind: str, call: str, device: int, stream: Stream, number: int) -> None:
        """Do a copy or a fill; the call returns when it is done."""
        gpu = self._gpu(device)
        kernel = Kernel(call, 1, 32, (stream,), compute_ns_per_mib=_COPY_NS_PER_MIB)
        start = self._spend(_CALL_NS)
        work = self._new_work(kind, call, self._next_correlation(), kernel)
        work.n_bytes, work.copy_kind = stream.n_bytes or 0, number
        self._streams.add(gpu, work, [self._place(stream.allocation)])
        self._streams.wait(lambda: self._streams.is_idle(gpu))
        self._now = max(self._now, work.end_ns + _CALL_NS)
        self._call(call, start, work.correlation)

    def _prefetch(self, operation: Prefetch) -> None:
        pages = self._pages(operation.allocation, operation.offset_bytes, operation.n_bytes)
        to_cpu = operation.device == CPU
        gpu = 0 if to_cpu else self._gpu(operation.device)
        start = self._spend(_CALL_NS)
        work = self._new_work(PREFETCH, operation.allocation, self._next_correlation())
        work.destination, work.pages = 0 if to_cpu else gpu + 1, pages
        self._streams.catch_up(self._now)
        waits = self._streams.is_idle(gpu)
        self._streams.add(gpu, work, [])
        if waits:  # a first call returns when its array is there (calibration.md 4)
            self._streams.begin_work()
            self._now = max(self._now, work.end_ns)
        self._call("cudaMemPrefetchAsync_v8000", start, work.correlation)

    # Names --------------------------------------------------------------------------------------

    @property
    def _page_bytes(self) -> int:
        return self._streams.rules.page_bytes

    def _gpu(self, device: int) -> int:
        n_gpus = self._settings.n_gpus
        if not 0 <= device < n_gpus:
            raise ProgramError(f"There is no GPU {device}", f"The machine has {n_gpus}")
        return device

    def _place(self, name: str) -> Place:
        if name not in self._live or self._live[name][1].device is not None:
            alive = ", ".join(n for n, (_, life) in self._live.items() if life.device is None)
            raise ProgramError(
                f"{name!r} is not allocated as managed memory then", f"Alive are: {alive or 'none'}"
            )
        return self._live[name][0]

    def _size(self, name: str, n_bytes: int | None, offset: int = 0) -> int:
        """Give how much of an allocation is meant: all that follows if nothing is said."""
        self._pages(name, offset, n_bytes)  # refuses what goes past it
        return self._place(name).n_bytes - offset if n_bytes is None else n_bytes

    def _pages(self, name: str, offset: int, n_bytes: int | None) -> tuple[int, int]:
        """Give the half-open range of pages of a part of an allocation."""
        place = self._place(name)
        size = place.n_bytes - offset if n_bytes is None else n_bytes
        if offset < 0 or size <= 0 or offset + size > place.n_bytes:
            raise ProgramError(
                f"{size} byte from {offset} on go past {name!r} ({place.n_bytes} byte)",
                "Keep offset_bytes + n_bytes within it",
            )
        start = place.start + offset
        return start // self._page_bytes, -(-(start + size) // self._page_bytes)

    def _whole_pages(self, name: str, offset: int, n_bytes: int | None) -> tuple[int, int]:
        """Give the half-open range of the pages that lie wholly in a part; it may be empty."""
        self._pages(name, offset, n_bytes)  # refuses what goes past it
        start = self._place(name).start + offset
        first = -(-start // self._page_bytes)
        last = (start + self._size(name, n_bytes, offset)) // self._page_bytes
        return first, max(first, last)


def _chunks(n_bytes: int) -> int:
    return -(-n_bytes // VA_BLOCK_BYTES)
