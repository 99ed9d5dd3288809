"""A tensor program under an allocator: what the driver sees of it.

Without caching every tensor is an allocation of its own; with PyTorch's caching allocator the driver
sees segments, and kernels touch parts of them. The allocator's history is kept with the operation of
the program after which each entry happened, so that it gets the times of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, cast

from nsan.model import program as words
from nsan.model.access import Access, Random, Stream
from nsan.model.allocator_names import ALLOCATORS, SWITCHES, Allocation, parse_allocator
from nsan.model.hints import Hint, check_names, meant
from nsan.model.layout import Layout
from nsan.model.networks import tensors as t
from nsan.model.profiles import GpuProfile
from nsan.model.recording import BASE_VA
from nsan.torch_alloc.blocks import Block, Segment
from nsan.torch_alloc.machine import CachingAllocator
from nsan.torch_alloc.plain import PlainAllocator
from nsan.torch_alloc.settings import DEFAULT_SETTINGS, AllocatorSettings
from nsan.units import MIB
from nsan.uvm.constants import VA_BLOCK_BYTES

__all__ = [
    "ALLOCATORS",
    "SWITCHES",
    "Allocation",
    "Entry",
    "History",
    "Placed",
    "parse_allocator",
    "placed",
]

_THREADS: Final = 1024
_ELEMENT_BYTES: Final = 64
"""Each thread goes on by 64 byte: a thread block covers 64 KiB of each tensor."""

_FLOPS_PER_SM: Final = 100e9
"""Sustained single precision rate of one multiprocessor: about half the peak of an A100's. Assumed."""

_SHARE_OF_BANDWIDTH: Final = 0.8
"""Of the memory's peak rate that a kernel reaches. Assumed."""

_ROW_BYTES: Final = 768 * 4
"""A row of the embedding tables of BERT-base and GPT-2 small."""

_IN_ORDER: Final = ("wpe", "position", "token_type")
"""Tables of which the first rows are read, one after the other."""

_LEAST_KERNEL_NS: Final = 4_000
"""A kernel that does next to nothing."""


class Allocator(Protocol):
    """What placing needs of an allocator."""

    def allocate(self, n_bytes: int, *, stream: int = 0, pool: str = "0,0") -> Block:
        """Give a block."""

    def free(self, block: Block, *, pending: bool = False) -> None:
        """Take a block back."""

    def segments(self) -> list[Segment]:
        """List the segments by address."""

    def blocks(self, segment: Segment | None = None) -> list[Block]:
        """List the blocks by address."""


class Entry(NamedTuple):
    """One entry of the allocator's history.

    ``after`` counts the operations of the program that were done by then; ``stack`` is the tensor.
    """

    action: str
    va: int
    n_bytes: int
    stream: int
    pool: str
    after: int
    stack: str


@dataclass(frozen=True)
class History:
    """What the allocator did and left; times come from the run of the program.

    Attributes
    ----------
    network, allocator : str
        What was trained; "raw", or "caching" with its switches.
    entries : list of Entry
        In order.
    block_bytes : list of int
        Size of the block that each entry "alloc" gave, in their order.
    segments : list of Segment
        At the end, by address.
    blocks : list of Block
        At the end, by address.
    owners : dict of int to str
        Tensor by address of its block, at the end.
    """

    network: str
    allocator: str
    entries: list[Entry]
    block_bytes: list[int]
    segments: list[Segment]
    blocks: list[Block]
    owners: dict[int, str]


@dataclass(frozen=True)
class Placed:
    """A tensor program as the driver sees it, the allocator's history, and the hints given."""

    program: words.Program
    history: History
    peak_tensor_bytes: int
    hints: tuple[Hint, ...] = ()


def placed(
    tensors: t.TensorProgram,
    allocator: str,
    gpu: GpuProfile,
    *,
    hints: Iterable[Hint] = (),
    settings: AllocatorSettings = DEFAULT_SETTINGS,
) -> Placed:
    """Allocate the tensors of a program and say what the driver is asked to do.

    Parameters
    ----------
    tensors : TensorProgram
        Tensors and kernels, in order.
    allocator : str
        As :func:`parse_allocator` reads it.
    gpu : GpuProfile
        Decides how long kernels compute.
    hints : iterable of Hint
        Prefetches and advice.
    settings : AllocatorSettings
        Of the caching allocator.

    Returns
    -------
    Placed
        Program for :func:`nsan.model.machine.run`, with addresses that the trace will have.

    Raises
    ------
    UsageError
        If there is no such allocator or switch, or a hint names a tensor that is not there.
    """
    hints = tuple(hints)
    check_names(
        hints, (each.tensor.name for each in tensors.operations if isinstance(each, t.Create))
    )
    return _Placer(tensors, parse_allocator(allocator), gpu, hints, settings).run()


class _Span(NamedTuple):
    """Where a tensor lies: managed allocation, offset in it, size; and what it is."""

    allocation: str
    offset: int
    n_bytes: int
    role: str
    tensor: str


@dataclass
class _Placer:
    """One pass over the operations of a tensor program."""

    tensors: t.TensorProgram
    allocation: Allocation
    gpu: GpuProfile
    hints: tuple[Hint, ...]
    settings: AllocatorSettings
    operations: list[words.Operation] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    block_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._layout = Layout()
        self._is_raw = self.allocation.kind == "raw"
        switches = self.allocation.switches
        self._releases, self._drops = "release" in switches, "drop" in switches
        self._unit_bytes = VA_BLOCK_BYTES if "apart" in switches else 1
        self._allocator: Allocator = (
            PlainAllocator(place=self._place, listen=self._listen)
            if self._is_raw
            else CachingAllocator(self.settings, place=self._place, listen=self._listen)
        )
        self._is_new = False
        self._allocations: dict[int, str] = {}
        self._n_segments = 0
        self._blocks: dict[str, Block] = {}
        self._spans: dict[str, _Span] = {}
        self.sparse_reads: Mapping[str, int] = cast(
            "Mapping[str, int]", self.tensors.facts.get("sparse_reads", {})
        )
        self._now = ""
        self._live = self._peak = 0

    def run(self) -> Placed:
        self._phase: str | None = None
        for operation in self.tensors.operations:
            self._do(operation)
        self._close_phase()
        history = History(
            self.tensors.name,
            str(self.allocation),
            self.entries,
            self.block_bytes,
            self._allocator.segments(),
            self._allocator.blocks(),
            {block.va: name for name, block in self._blocks.items()},
        )
        program = words.Program(self.tensors.name, tuple(self.operations))
        return Placed(program, history, self._peak, self.hints)

    def _do(self, operation: t.Operation) -> None:
        if isinstance(operation, t.Create):
            self._create(operation.tensor)
        elif isinstance(operation, t.Drop):
            self._drop(operation.name)
        elif isinstance(operation, t.Compute):
            self._compute(operation)
        elif isinstance(operation, t.HostWrite):
            span = self._spans[operation.name]
            self.operations.append(
                words.Copy(span.allocation, offset_bytes=span.offset, n_bytes=span.n_bytes)
            )
        elif isinstance(operation, t.Step):
            self._close_phase()
            self.operations += [words.Synchronize(), words.Mark(f"step {operation.number}")]
            self.operations.append(words.PushRange("step"))
            self._phase = ""
        else:
            self._open_phase(operation.name)

    # Marks --------------------------------------------------------------------------------------

    def _open_phase(self, name: str) -> None:
        if self._phase:
            self.operations.append(words.PopRange())
        self.operations.append(words.PushRange(name))
        self._phase = name

    def _close_phase(self) -> None:
        """End the step: PyTorch waits for the loss there."""
        if self._phase is None:
            return
        self.operations.append(words.Synchronize())
        if self._phase:
            self.operations.append(words.PopRange())
        self.operations.append(words.PopRange())
        self._phase = None

    # Memory -------------------------------------------------------------------------------------

    def _place(self, n_bytes: int) -> int:
        """Take room as the modelled machine will, for the next managed allocation."""
        name = self._now if self._is_raw else f"segment {self._n_segments}"
        self._n_segments += 1
        self._layout.add(words.Allocate(name, n_bytes))
        va = BASE_VA + self._layout.places[-1].start
        self._allocations[va] = name
        return va

    def _listen(self, action: str, va: int, n_bytes: int, stream: int, pool: str) -> None:
        if action == "segment_alloc":
            self.operations.append(words.Allocate(self._allocations[va], n_bytes))
            self._is_new = True
        elif action == "segment_free":
            name = self._allocations.pop(va)
            self.operations.append(words.Free(name))
            self._layout.add(words.Free(name))
        elif action == "alloc" and self._releases and not self._is_new:
            self.operations.append(words.HostWait(words.ALLOCATION_NS))
        self.entries.append(
            Entry(action, va, n_bytes, stream, pool, len(self.operations), self._now)
        )
        if action == "segment_alloc" and self._drops:
            self.operations.append(words.MarkDead(self._allocations[va], 0, n_bytes))

    def _create(self, tensor: t.Tensor) -> None:
        self._now = tensor.name
        asked = -(-tensor.n_bytes // self._unit_bytes) * self._unit_bytes
        self._is_new = False
        block = self._allocator.allocate(asked)
        self._blocks[tensor.name] = block
        self.block_bytes.append(block.n_bytes)
        if self._drops:
            self.operations.append(words.MarkDead(*self._where(block), dead=False))
        name, offset, _ = self._where(block)
        span = _Span(name, offset, tensor.n_bytes, tensor.role, tensor.name)
        self._spans[tensor.name] = span
        self._live += tensor.n_bytes
        self._peak = max(self._peak, self._live)
        self._advise(span, given=True)

    def _drop(self, name: str) -> None:
        self._now = name
        span = self._spans.pop(name)
        self._advise(span, given=False)
        self._live -= span.n_bytes
        block = self._blocks.pop(name)
        self._allocator.free(block)
        if not self._is_raw:
            self._end_pages(block)

    def _end_pages(self, block: Block) -> None:
        """Do what the switches add to a free; the block is now all of the free block that it is in."""
        if self._releases and not block.is_split and isinstance(self._allocator, CachingAllocator):
            self._allocator.release(block.segment)
            return
        if self._drops:
            self.operations.append(words.MarkDead(*self._where(block)))
        if self._releases:
            self.operations.append(words.Discard(*self._where(block)))

    def _where(self, block: Block) -> tuple[str, int, int]:
        """Give allocation, offset and size of a block."""
        base = block.segment.va
        return self._allocations[base], block.va - base, block.n_bytes

    def _advise(self, span: _Span, *, given: bool) -> None:
        """Give advice for a new tensor; take it back with the tensor, whose place others get."""
        advice = {
            "read-mostly": ("read_mostly", 0),
            "preferred-gpu": ("preferred_location", 0),
            "preferred-cpu": ("preferred_location", words.CPU),
            "accessed-by": ("accessed_by", 0),
        }
        for hint in self.hints:
            if hint.kind in advice and _is_meant(hint, span):
                name, device = advice[hint.kind]
                self.operations.append(
                    words.Advise(
                        span.allocation,
                        name if given else f"unset_{name}",
                        device,
                        span.offset,
                        span.n_bytes,
                    )
                )

    # Work ---------------------------------------------------------------------------------------

    def _compute(self, compute: t.Compute) -> None:
        writes = set(compute.writes)
        names = list(dict.fromkeys((*compute.reads, *compute.writes)))
        spans = [self._spans[name] for name in names]
        self._prefetch(spans)
        uses = [
            _Use(span, span.n_bytes, write=name in writes)
            for name, span in zip(names, spans, strict=True)
        ]
        if compute.name in self.sparse_reads:
            uses = _with_lookup(uses, compute.name, self.sparse_reads[compute.name])
        self.operations.append(words.Launch(self._kernel(compute, uses)))

    def _prefetch(self, spans: list[_Span]) -> None:
        for hint in self.hints:
            meant = [span for span in spans if _is_meant(hint, span)]
            if hint.kind == "prefetch":
                for span in meant:
                    self.operations.append(
                        words.Prefetch(span.allocation, 0, span.offset, span.n_bytes)
                    )
            elif hint.kind == "prefetch-object":
                objects = dict.fromkeys(span.allocation for span in meant)
                self.operations += [words.Prefetch(name) for name in objects]

    def _kernel(self, compute: t.Compute, uses: list[_Use]) -> words.Kernel:
        """Choose a launch in which each thread block works once and all take the kernel's time."""
        longest = max(use.n_bytes for use in uses)
        grid = max(-(-longest // (_THREADS * _ELEMENT_BYTES)), 1)
        # Of 256 threads a multiprocessor holds `blocks_per_sm` thread blocks; these have four times more.
        slots = self.gpu.n_sms * max(self.gpu.blocks_per_sm * 256 // _THREADS, 1)
        rounds = -(-grid // slots)
        step_bytes = len(uses) * _THREADS * 4
        step_ns = self._kernel_ns(compute, uses) / rounds
        streams = tuple(use.access(grid) for use in uses)
        return words.Kernel(
            compute.name, grid, _THREADS, streams, compute_ns_per_mib=step_ns * MIB / step_bytes
        )

    def _kernel_ns(self, compute: t.Compute, uses: list[_Use]) -> float:
        """Time of a kernel whose memory is all there: the slower of computing and moving bytes."""
        n_bytes = sum(use.n_bytes for use in uses)
        moving = n_bytes / (self.gpu.memory_bytes_per_s * _SHARE_OF_BANDWIDTH)
        computing = compute.flops / (self.gpu.n_sms * _FLOPS_PER_SM)
        return max(1e9 * max(moving, computing), _LEAST_KERNEL_NS)


@dataclass(frozen=True)
class _Use:
    """How a kernel uses a tensor: all of it, its front, or some rows anywhere in it."""

    span: _Span
    n_bytes: int
    write: bool = False
    anywhere: bool = False

    def access(self, grid: int) -> Access:
        where = self.span
        if self.anywhere:
            return Random(
                allocation=where.allocation,
                offset_bytes=where.offset,
                n_bytes=where.n_bytes,
                element_bytes=_ROW_BYTES,
                draws=max(self.n_bytes // _ROW_BYTES // grid, 1),
            )
        return Stream(
            allocation=where.allocation,
            write=self.write,
            offset_bytes=where.offset,
            n_bytes=self.n_bytes,
            element_bytes=_ELEMENT_BYTES,
        )


def _with_lookup(uses: list[_Use], name: str, n_bytes: int) -> list[_Use]:
    """Let a kernel touch only some of the largest tensor that it reads: words anywhere, else its front."""
    table = max((use for use in uses if not use.write), key=lambda use: use.n_bytes)
    in_order = "embedding" not in name or any(word in name for word in _IN_ORDER)
    anywhere = not in_order and table.n_bytes >= _ROW_BYTES
    part = replace(table, n_bytes=min(n_bytes, table.n_bytes), anywhere=anywhere)
    return [part if use is table else use for use in uses]


def _is_meant(hint: Hint, span: _Span) -> bool:
    return meant(hint, span.tensor, span.role, span.n_bytes)
