"""The GPUs' streams: kernels, copies and prefetches one after the other, and the engine that runs them.

Each GPU has one stream. Before the host changes anything, the engine catches up with it. A user's
prefetch and an eviction for ``cudaMalloc`` change the state at once, when they begin; their copies take
their time. What the host touches meanwhile sees the new places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import polars as pl

from nsan.errors import ProgramError
from nsan.model.access import Access, Shape
from nsan.model.engine import loop
from nsan.model.engine import state as st
from nsan.model.engine.handle import pointer_to
from nsan.model.happened import MARK_DEAD, PREFETCH, Happened, Work
from nsan.model.layout import Place
from nsan.model.program import Kernel
from nsan.model.settings import Settings
from nsan.units import MIB

_GAP_NS: Final = 1_500
"""Between two pieces of work in a stream."""

_RETIRE_NS: Final = 1_000
"""From the end of the last thread block to the end of the kernel."""

_MAX_BLOCKS_PER_SM: Final = 32
_THREADS_OF_A_SLOT: Final = 256

_NARROW: Final[dict[str, type[pl.DataType]]] = {
    "page": pl.Int32,
    "n_pages": pl.Int32,
    "block": pl.Int32,
    "src": pl.Int8,
    "dst": pl.Int8,
    "cause": pl.Int8,
    "kept": pl.Int8,
    "gpu": pl.Int8,
    "processor": pl.Int8,
    "access": pl.Int8,
    "outcome": pl.Int8,
    "kind": pl.Int8,
    "reason": pl.Int8,
    "batch": pl.Int32,
    "n_entries": pl.Int32,
    "n_page_faults": pl.Int32,
    "n_blocks": pl.Int32,
}
"""Types that keep the log of a long run small."""

Tell = Callable[[int], None]


class Streams:
    """The modelled GPUs.

    Parameters
    ----------
    settings : Settings
        The machine and its driver.
    n_bytes : int
        Managed memory that the program ever has.
    happened : Happened
        Gets the work as it begins.
    tell : callable
        Called now and then with the number of batches served.
    """

    def __init__(self, settings: Settings, n_bytes: int, happened: Happened, tell: Tell) -> None:
        self.settings, self.rules = settings, settings.rules()
        capacity = [settings.capacity_chunks] * settings.n_gpus
        n_pages = n_bytes // self.rules.page_bytes
        log_rows = 2 * loop.log_margin(self.rules.batch_size, self.rules.block_pages)
        self.state = st.new_state(n_pages, self.rules, capacity, settings.seed, log_rows)
        self._handle = pointer_to(self.state)
        self._happened = happened
        self._tell = tell
        self._queues: list[deque[tuple[Work, list[Place]]]] = [
            deque() for _ in range(settings.n_gpus)
        ]
        self._running: list[Work | None] = [None] * settings.n_gpus
        self._free_at = [0] * settings.n_gpus
        self._parts: dict[str, list[pl.DataFrame]] = {name: [] for name in st.LOG_COLUMNS}
        self._n_copies_drained = 0

    @property
    def n_copies(self) -> int:
        """How many copies the engine has written down so far."""
        return self._n_copies_drained + int(self.state.log.n[st.N_COPIES])

    @property
    def free_at(self) -> int:
        """When the last GPU was, or will be, done with what has begun."""
        return max(self._free_at)

    def is_idle(self, gpu: int | None = None) -> bool:
        """Say whether a GPU, or all of them, have nothing to do."""
        gpus = range(len(self._queues)) if gpu is None else [gpu]
        return not any(self._queues[g] or self._running[g] for g in gpus)

    def add(self, gpu: int, work: Work, places: list[Place]) -> None:
        """Put work into a stream; ``places`` are those of its kernel's access streams."""
        self._queues[gpu].append((work, places))

    def wait(self, reached: Callable[[], bool]) -> None:
        """Let the machine go on until something is reached."""
        self.begin_work()
        while not reached():
            if self._advance(loop.FOREVER) == loop.IDLE and not reached():
                raise ProgramError("The program waits for what never comes", "Please report this")

    def catch_up(self, time: int) -> None:
        """Let all happen that happens until a time: what the host does next comes after it."""
        self.begin_work()
        while self._advance(time) not in (loop.IDLE, loop.CAUGHT_UP):
            pass

    def _advance(self, until: int) -> int:
        reason = int(loop.advance(self._handle, self.rules, until))
        self._drain_if_needed()
        if reason == loop.KERNEL_DONE:
            self._finish_kernels()
            self.begin_work()
        return reason

    def touch(self, pages: tuple[int, int], ns_per_page: int, start_ns: int, *, write: bool) -> int:
        """Let the host thread go through pages; give when it is done."""
        host = self.state.host
        host[st.PAGE], host[st.END_PAGE] = pages
        host[st.HOST_WRITES] = int(write)
        host[st.NS_PER_PAGE] = ns_per_page
        host[st.FAULT_LOGGED] = host[st.TOUCHED] = 0
        loop.start_host(self._handle, start_ns)
        self.wait(lambda: not host[st.RUNNING])
        return int(host[st.HOST_TIME])

    def free_pages(self, pages: tuple[int, int], time: int) -> None:
        """Forget pages at the end of an allocation."""
        for part in _in_parts(pages):
            loop.free(self._handle, self.rules, part, time)
            self._drain_if_needed()

    def discard(self, pages: tuple[int, int], time: int) -> None:
        """Give up pages of an allocation that goes on; a whole block is as new to the driver."""
        for part in _in_parts(pages):
            loop.discard(self._handle, self.rules, part, time)
            self._drain_if_needed()
        first, last = -(-pages[0] // self.rules.block_pages), pages[1] // self.rules.block_pages
        self.state.chunks.serviced[:, first : max(first, last)] = 0

    def take_chunks(self, gpu: int, n_chunks: int, time: int) -> int | None:
        """Take chunks away from managed memory, evicting; give when that is done, None if it cannot."""
        numbers = self.state.gpu.now[gpu]
        if n_chunks >= numbers[st.CAPACITY]:
            return None  # one chunk stays: without any no page could ever come
        numbers[st.CAPACITY] -= n_chunks
        while numbers[st.USED] > numbers[st.CAPACITY]:
            time = max(time, int(loop.shrink(self._handle, self.rules, gpu, time)))
            self._drain()
        return time

    def give_chunks(self, gpu: int, n_chunks: int) -> None:
        """Give chunks back to managed memory."""
        self.state.gpu.now[gpu, st.CAPACITY] += n_chunks

    def finish(self) -> None:
        """Wait for all work, and hand the log over."""
        self.wait(self.is_idle)
        self._drain()
        self._happened.log = {
            name: pl.concat(parts, rechunk=False) for name, parts in self._parts.items()
        }

    def begin_work(self) -> None:
        """Begin what stands first in the stream of each idle GPU."""
        for gpu, queue in enumerate(self._queues):
            while queue and self._running[gpu] is None:
                work, places = queue.popleft()
                work.start_ns = max(work.ready_ns, self._free_at[gpu] + _GAP_NS)
                if work.kind == MARK_DEAD:
                    self._mark_dead(gpu, work)
                elif work.kind == PREFETCH:
                    self._prefetch(gpu, work)
                else:
                    self._running[gpu] = work
                    self._happened.work.append((gpu, work))
                    self._start(gpu, work, places)

    def _mark_dead(self, gpu: int, work: Work) -> None:
        """Mark pages right behind what came before in the stream; no time passes."""
        work.start_ns = work.end_ns = max(work.ready_ns, self._free_at[gpu])
        for part in _in_parts(work.pages):
            loop.mark_dead(self._handle, part, work.dead, work.start_ns)
            self._drain_if_needed()

    def _prefetch(self, gpu: int, work: Work) -> None:
        page, last = work.pages
        time = work.start_ns
        first_copy = self.n_copies
        while page < last:
            page = loop.migrate(self._handle, self.rules, work.destination, (page, last), time)
            time = -1  # the pipeline goes on where it was
            self._drain_if_needed()
        work.end_ns = max(int(loop.pipeline_end(self._handle)), work.start_ns)
        self._free_at[gpu] = work.end_ns
        self._happened.prefetch_copies.append((work.operation, first_copy, self.n_copies))

    def _start(self, gpu: int, work: Work, places: list[Place]) -> None:
        """Write a kernel into the engine's numbers and start its first thread blocks."""
        kernel = work.kernel or Kernel(work.name, 1, 32, ())
        now = self.state.gpu.now[gpu]
        steps = 1
        for i, (stream, place) in enumerate(zip(kernel.streams, places, strict=True)):
            numbers, n_steps = _encoded(stream, place, kernel, self.rules.page_bytes)
            self.state.gpu.streams[gpu, i] = numbers
            self.state.gpu.shapes[gpu, i] = stream.exponent_or_zero
            steps = max(steps, n_steps)
        step_bytes = len(kernel.streams) * max(
            kernel.threads * 4, self.rules.page_bytes if kernel.grid == 1 else 0
        )
        now[st.KERNEL] = len(self._happened.work) - 1
        now[st.GRID] = kernel.grid
        now[st.STEPS] = steps * kernel.repeat
        now[st.SWEEP_STEPS] = steps
        now[st.PHASES] = max(stream.phase for stream in kernel.streams) + 1
        now[st.STREAMS] = len(kernel.streams)
        now[st.STEP_NS] = max(int(kernel.compute_ns_per_mib * step_bytes / MIB), 1)
        now[st.ENDED] = work.start_ns
        loop.start_kernel(self._handle, gpu, self._slots(kernel), work.start_ns)

    def _slots(self, kernel: Kernel) -> int:
        """Count the thread blocks of a kernel that can be resident at once."""
        profile = self.settings.gpu_profile
        per_sm = profile.blocks_per_sm * _THREADS_OF_A_SLOT // kernel.threads
        per_sm = min(max(per_sm, 1), _MAX_BLOCKS_PER_SM)
        return min(kernel.grid, profile.n_sms * per_sm, st.MAX_SLOTS)

    def _finish_kernels(self) -> None:
        for gpu, work in enumerate(self._running):
            now = self.state.gpu.now[gpu]
            if work is None or not now[st.DONE]:
                continue
            now[st.DONE] = 0
            now[st.BUFFERED] = 0  # what is left in the buffer is of nobody any more
            now[st.KERNEL] = -1
            work.end_ns = int(max(now[st.ENDED], now[st.SERVICE_END])) + _RETIRE_NS
            self._free_at[gpu] = work.end_ns
            self._running[gpu] = None

    def _drain_if_needed(self) -> None:
        """Take rows out while there are many; a few may stay for the next time."""
        if self.state.log.n[: st.N_LOGS - 1].max() > 1 << 14:
            self._drain()
        self._tell(int(self.state.log.n[st.NEXT_BATCH]))

    def _drain(self) -> None:
        """Take the rows out of the engine's log."""
        log = self.state.log
        self._n_copies_drained += int(log.n[st.N_COPIES])
        for i, (name, columns) in enumerate(st.LOG_COLUMNS.items()):
            n = int(log.n[i])
            if n or not self._parts[name]:
                rows = getattr(log, name)[:n]  # copied below: the engine writes over them
                self._parts[name].append(
                    pl.DataFrame(
                        {
                            column: pl.Series(rows[:, k].copy(), dtype=pl.Int64).cast(
                                _NARROW.get(column, pl.Int64)
                            )
                            for k, column in enumerate(columns)
                        }
                    )
                )
            log.n[i] = 0


def _in_parts(pages: tuple[int, int]) -> list[tuple[int, int]]:
    """Cut a range of pages so that the log has room for each part."""
    first, last = pages
    starts = range(first, last, loop.FREE_AT_ONCE)
    return [(start, min(start + loop.FREE_AT_ONCE, last)) for start in starts]


def _encoded(
    stream: Access, place: Place, kernel: Kernel, page_bytes: int
) -> tuple[list[int], int]:
    """Turn an access stream into the engine's numbers, and count its steps."""
    n_bytes = place.n_bytes - stream.offset_bytes if stream.n_bytes is None else stream.n_bytes
    if stream.offset_bytes < 0 or n_bytes <= 0 or stream.offset_bytes + n_bytes > place.n_bytes:
        raise ProgramError(
            f"A stream of {kernel.name!r} goes past {place.name!r} ({place.n_bytes} byte)",
            "Keep offset_bytes + n_bytes within it",
        )
    if stream.unit_bytes > n_bytes:
        raise ProgramError(
            f"One element of a stream of {kernel.name!r} has {stream.unit_bytes} byte, its part of "
            f"{place.name!r} {n_bytes}",
            "Make the element smaller",
        )
    shape = Shape(kernel.grid, kernel.threads, page_bytes)
    own = stream.own_numbers(shape)
    numbers = [stream.pattern, place.start + stream.offset_bytes, n_bytes]
    numbers += [int(stream.write), stream.phase, *own]
    numbers += [0] * (st.STREAM_NUMBERS - len(numbers))
    return numbers, stream.steps(shape, n_bytes)
