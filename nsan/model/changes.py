"""Remedies as changes of a program: the same program with a prefetch, an advice, a first touch elsewhere.

What a change is about is named as a trace names it: managed allocations by their number or their addresses,
kernels by their name. Where a call goes into the program is a choice of ours: a prefetch stands right before the
launch that it is for, advice right before the first launch that uses what it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from nsan.model.access import Access, Stream
from nsan.model.making import Recipe, peak_bytes
from nsan.model.origin import Trained
from nsan.model.parts import ChangeError, Part, Parts, Spot, parts_of
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    Fill,
    HostTouch,
    Kernel,
    Launch,
    Operation,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.units import format_bytes
from nsan.uvm.constants import VA_BLOCK_BYTES

_THREADS: Final = 256
_FILL: Final = "fill"


# Calls --------------------------------------------------------------------------------------------


def with_prefetches(program: Program, spot: Spot, device: int = 0) -> Program:
    """Prefetch to a GPU before each launch that uses the memory, or to the CPU before the host touches it again.

    What the program itself prefetches of the memory to the GPU right before the launch gives way.

    Parameters
    ----------
    program : Program
        The program.
    spot : Spot
        What is prefetched, and before which kernel.
    device : int, default 0
        A GPU, or ``CPU``: then the host waits for the GPU first.

    Returns
    -------
    Program
        With the calls.

    Raises
    ------
    ChangeError
        If there is no such launch, or no such touch after one.
    """
    parts = Parts(parts_of(program, spot))
    if device == CPU:
        return _with_prefetches_back(program, parts)

    operations: list[Operation] = []
    is_changed = False
    for i, operation in enumerate(program.operations):
        if isinstance(operation, Launch) and operation.device == device:
            kernel = operation.kernel
            for part in parts.of(i, *kernel.streams) if spot.kernel in {"", kernel.name} else ():
                own = Prefetch(part.name, device, part.offset_bytes, part.n_bytes)
                _give_way(operations, own)
                operations.append(own)
                is_changed = True
        operations.append(operation)
    if not is_changed:
        raise ChangeError("No launch on that GPU uses the memory.")
    return replace(program, operations=tuple(operations))


def _give_way(operations: list[Operation], own: Prefetch) -> None:
    """Take away what the program prefetches of the same memory since the last launch."""
    i = len(operations)
    while i and not isinstance(operations[i - 1], Launch):
        i -= 1
    operations[i:] = [each for each in operations[i:] if not _is_within(each, own)]


def _is_within(operation: Operation, own: Prefetch) -> bool:
    if not isinstance(operation, Prefetch) or operation.device != own.device:
        return False
    if operation.allocation != own.allocation or operation.offset_bytes < own.offset_bytes:
        return False
    if own.n_bytes is None or operation.n_bytes is None:
        return own.n_bytes is None
    return operation.offset_bytes + operation.n_bytes <= own.offset_bytes + own.n_bytes


def _with_prefetches_back(program: Program, parts: Parts) -> Program:
    on_gpu: set[Part] = set()

    def added(i: int, operation: Operation) -> Iterator[Operation]:
        if isinstance(operation, Launch):
            on_gpu.update(parts.of(i, *operation.kernel.streams))
        elif isinstance(operation, HostTouch):
            for part in parts.of(i, operation):
                if part not in on_gpu:
                    continue
                on_gpu.discard(part)
                yield Prefetch(part.name, CPU, part.offset_bytes, part.n_bytes)
                yield Synchronize()

    return _with_before(program, added, "The host does not touch the memory after a launch.")


def without_prefetches(program: Program, spot: Spot, device: int | None = None) -> Program:
    """Leave prefetches out.

    Parameters
    ----------
    program : Program
        The program.
    spot : Spot
        Of which memory; the kernel means nothing.
    device : int, optional
        Only those to this GPU, or to the ``CPU``.

    Returns
    -------
    Program
        Without the calls.

    Raises
    ------
    ChangeError
        If there is none.
    """
    parts = Parts(parts_of(program, spot))

    def stays(i: int, operation: Operation) -> bool:
        if not isinstance(operation, Prefetch) or device not in {None, operation.device}:
            return True
        return not parts.of(i, operation)

    kept = tuple(each for i, each in enumerate(program.operations) if stays(i, each))
    if len(kept) == len(program.operations):
        raise ChangeError("The program does not prefetch the memory.")
    return replace(program, operations=kept)


def with_advice(program: Program, spot: Spot, advice: str, device: int = 0) -> Program:
    """Advise the driver once the program has filled the memory: before the first launch that uses it.

    Parameters
    ----------
    program : Program
        The program.
    spot : Spot
        About which memory.
    advice : str
        "read_mostly", "preferred_location" or "accessed_by".
    device : int, default 0
        A GPU, or ``CPU``.

    Returns
    -------
    Program
        With the calls.

    Raises
    ------
    ChangeError
        If no launch uses the memory, or if it is at another GPU: the model maps no memory of a peer.
    """
    waiting = Parts(parts_of(program, spot))
    if advice == "accessed_by" and device != CPU and _is_at_peer(program, waiting, device):
        raise ChangeError(
            "It needs peer access, and the driver model maps no GPU's memory for another GPU."
        )

    def added(i: int, operation: Operation) -> Iterator[Operation]:
        for part in waiting.of(i, *_streams(operation)):
            waiting.drop(part)
            yield Advise(part.name, advice, device, part.offset_bytes, part.n_bytes)

    return _with_before(program, added, "No launch uses the memory.")


def _is_at_peer(program: Program, parts: Parts, device: int) -> bool:
    """Say whether the program prefers another GPU for some of the memory."""
    return any(
        isinstance(each, Advise)
        and each.advice == "preferred_location"
        and each.device not in {CPU, device}
        and bool(parts.of(i, each))
        for i, each in enumerate(program.operations)
    )


def with_first_touch(program: Program, spot: Spot, device: int = 0) -> Program:
    """Let the GPU fill the memory, where the host fills it before any launch uses it.

    Parameters
    ----------
    program : Program
        The program.
    spot : Spot
        Which memory.
    device : int, default 0
        The GPU.

    Returns
    -------
    Program
        With a prefetch and ``cudaMemset`` in the place of each write of the host; with a kernel where that
        writes no front.

    Raises
    ------
    ChangeError
        If the host does not fill it before.
    """
    unused = Parts(parts_of(program, spot))
    operations: list[Operation] = []
    sizes: dict[str, int] = {}
    for i, operation in enumerate(program.operations):
        if isinstance(operation, Allocate):
            sizes[operation.name] = operation.n_bytes
        for part in unused.of(i, *_streams(operation)):
            unused.drop(part)
        if isinstance(operation, HostTouch) and operation.write and unused.of(i, operation):
            operations += _filled(operation, sizes[operation.allocation], device)
        else:
            operations.append(operation)
    if tuple(operations) == program.operations:
        raise ChangeError("The host does not fill the memory before a launch uses it.")
    return replace(program, operations=tuple(operations))


def _filled(touch: HostTouch, size: int, device: int) -> tuple[Prefetch, Fill | Launch]:
    """Let the GPU write what the host writes; the prefetch makes pages there without a fault, and copies nothing."""
    made = Prefetch(touch.allocation, device, touch.offset_bytes, touch.n_bytes)
    if not touch.offset_bytes:
        return made, Fill(touch.allocation, device, touch.n_bytes)
    n_bytes = size - touch.offset_bytes if touch.n_bytes is None else touch.n_bytes
    stream = Stream(
        allocation=touch.allocation, write=True, offset_bytes=touch.offset_bytes, n_bytes=n_bytes
    )
    return made, Launch(
        Kernel(_FILL, max(-(-n_bytes // (4 * _THREADS)), 1), _THREADS, (stream,)), device
    )


def _with_before(
    program: Program,
    added: Callable[[int, Operation], Iterable[Operation]],
    nothing: str,
) -> Program:
    """Put operations before others."""
    operations: list[Operation] = []
    for i, operation in enumerate(program.operations):
        operations += [*added(i, operation), operation]
    if len(operations) == len(program.operations):
        raise ChangeError(nothing)
    return replace(program, operations=tuple(operations))


def _streams(operation: Operation) -> tuple[Access, ...]:
    """List what a launch touches; nothing of another operation."""
    return operation.kernel.streams if isinstance(operation, Launch) else ()


# The machine, and who allocates -------------------------------------------------------------------


def fitting(recipe: Recipe) -> Recipe:
    """Give each GPU as much memory as the program has allocated at one time.

    Parameters
    ----------
    recipe : Recipe
        The run.

    Returns
    -------
    Recipe
        With all the memory of the GPU for managed pages.

    Raises
    ------
    ChangeError
        If it had that already, or even that is not enough.
    """
    settings = replace(recipe.settings, capacity_bytes=None)
    room = settings.capacity_chunks * VA_BLOCK_BYTES
    needed = peak_bytes(recipe.program)
    if room <= recipe.settings.capacity_chunks * VA_BLOCK_BYTES:
        raise ChangeError("The modelled GPU gives the program all its memory already.")
    if room < needed:
        raise ChangeError(
            f"The program holds {format_bytes(needed)}: more than all memory of the modelled GPU, {format_bytes(room)}."
        )
    return replace(recipe, settings=settings)


def allocating(recipe: Recipe, allocator: str) -> Recipe:
    """Allocate the tensors of a training in another way, in the same memory.

    Parameters
    ----------
    recipe : Recipe
        The run.
    allocator : str
        As :func:`nsan.model.allocator_names.parse_allocator` reads it.

    Returns
    -------
    Recipe
        The same steps with tensors at other places.

    Raises
    ------
    ChangeError
        If the program is no training of a known network, or allocates so already.
    """
    origin = recipe.origin
    if not isinstance(origin, Trained):
        raise ChangeError("Which tensors the program has is known of networks of nsan only.")
    if origin.training.allocator == allocator:
        raise ChangeError(f"The program allocates with {allocator!r} already.")
    other = Trained(origin.network, replace(origin.training, allocator=allocator))
    program, placed = other.made(recipe.settings)
    return replace(recipe, program=program, placed=placed, origin=other)


def without_prefetcher(recipe: Recipe) -> Recipe:
    """Switch the driver's own prefetcher off.

    Parameters
    ----------
    recipe : Recipe
        The run.

    Returns
    -------
    Recipe
        With ``uvm_perf_prefetch_enable=0``.

    Raises
    ------
    ChangeError
        If it is off already.
    """
    if not recipe.settings.prefetch:
        raise ChangeError("The driver's prefetcher is off already.")
    return replace(recipe, settings=replace(recipe.settings, prefetch=False))
