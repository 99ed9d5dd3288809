"""Programs without a problem, of different kinds: what they do with managed memory is as it should be."""

from planting import Clean

from nsan.model.access import Stream
from nsan.model.making import Recipe
from nsan.model.networks import tensors as t
from nsan.model.placing import placed
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    HostTouch,
    Kernel,
    Launch,
    Mark,
    PopRange,
    Prefetch,
    Program,
    PushRange,
    Synchronize,
)
from nsan.model.settings import Settings
from nsan.model.size import Size
from nsan.model.workloads import workload
from nsan.units import MIB

_CHUNK, _N_CHUNKS = 16 * MIB, 12


def _kernel(name, n_bytes, *streams, ns_per_mib=4_000_000.0):
    """A kernel with one thread per word of its largest array, that computes for some time."""
    return Kernel(name, n_bytes // 1024, 256, streams, compute_ns_per_mib=ns_per_mib)


def _steps(n, *body):
    return [
        operation
        for i in range(n)
        for operation in (Mark(f"step {i}"), PushRange("step"), *body, PopRange())
    ]


def _touched_first_by_gpu():
    """The GPU fills memory and works on it for long; the CPU fetches the result at the end."""
    write, read = (Stream(allocation="field", write=True), Stream(allocation="field"))
    n_bytes = 8 * MIB
    return Program(
        "touched_first_by_gpu",
        (
            Allocate("field", n_bytes),
            Launch(_kernel("initialise", n_bytes, write)),
            *[Launch(_kernel("relax", n_bytes, read, ns_per_mib=6e9)) for _ in range(6)],
            Synchronize(),
            Prefetch("field", CPU),
            Synchronize(),
            HostTouch("field"),
        ),
    )


def _resident_steps():
    """All fits: brought once, found there in every step."""
    names, n_bytes = ("x", "y"), 8 * MIB
    kernel = _kernel("step", n_bytes, Stream(allocation="x"), Stream(allocation="y", write=True))
    return Program(
        "resident_steps",
        (
            *(Allocate(name, n_bytes) for name in names),
            *(HostTouch(name, write=True) for name in names),
            *(Prefetch(name) for name in names),
            *_steps(8, Launch(kernel), Synchronize()),
            Prefetch("y", CPU),
            Synchronize(),
            HostTouch("y"),
        ),
    )


def _advised():
    """A table that both read is read-mostly; the GPU writes a few words where the CPU looks at them."""
    table, words = 8 * MIB, MIB // 4
    kernel = _kernel("look_up", table, Stream(allocation="table"))
    return Program(
        "advised",
        (
            Allocate("table", table),
            Allocate("words", words),
            Advise("table", "read_mostly"),
            Advise("words", "preferred_location", CPU),
            Advise("words", "accessed_by", 0),
            HostTouch("table", write=True),
            HostTouch("words", write=True),
            Prefetch("table"),
            *_steps(6, Launch(kernel), Synchronize(), HostTouch("table", n_bytes=MIB), HostTouch("words")),
        ),
    )  # fmt: skip


def _cached_with_room():
    """A caching allocator whose memory fits: every step uses the memory of the one before."""
    operations = []
    for i in range(8):
        names = [f"activation {layer}#{i}" for layer in range(3)]
        operations.append(t.Step(i + 1))
        for name in names:
            operations += [
                t.Create(t.Tensor(name, 6 * MIB, "activation")),
                t.Compute("layer", (), (name,), 5e12),
            ]
        operations += [t.Drop(name) for name in reversed(names)]
    tensors = t.TensorProgram("cached_with_room", tuple(operations))
    made = placed(tensors, "caching", Settings().gpu_profile)
    return Recipe(made.program, placed=made)


def _streamed_once():
    """Memory larger than the GPU goes through it once, in chunks: each is there in time, and leaves after use."""
    n_bytes = _CHUNK * _N_CHUNKS
    parts = [{"offset_bytes": i * _CHUNK, "n_bytes": _CHUNK} for i in range(_N_CHUNKS)]
    operations = [
        Allocate("data", n_bytes),
        HostTouch("data", write=True),
        Prefetch("data", **parts[0]),
    ]
    for i, part in enumerate(parts):
        stream = Stream(allocation="data", write=True, **part)
        operations.append(Launch(_kernel("filter", _CHUNK, stream)))
        if i + 1 < _N_CHUNKS:
            operations.append(Prefetch("data", **parts[i + 1]))
        operations += [Prefetch("data", CPU, **part), Synchronize()]
    return Recipe(
        Program("streamed_once", (*operations, HostTouch("data"))),
        Settings(capacity_bytes=5 * _CHUNK),
    )


def _gpu_each():
    """Two GPUs, each with memory of its own, prefetched to it."""
    n_bytes = 8 * MIB
    operations = []
    for gpu in (0, 1):
        name = f"half {gpu}"
        operations += [Allocate(name, n_bytes), HostTouch(name, write=True), Prefetch(name, gpu)]
    work = [
        Launch(_kernel("own", n_bytes, Stream(allocation=f"half {gpu}", write=True)), gpu)
        for gpu in (0, 1)
    ]
    return Recipe(
        Program("gpu_each", (*operations, *_steps(4, *work, Synchronize()))), Settings(n_gpus=2)
    )


PLANTS = ()
CLEAN = (
    Clean("ahead-and-back", Recipe(workload("stream").build(Size(32 * MIB, prefetch="back")))),
    Clean("touched-first-by-gpu", Recipe(_touched_first_by_gpu())),
    Clean("resident-steps", Recipe(_resident_steps())),
    Clean("advised", Recipe(_advised())),
    Clean("cached-with-room", _cached_with_room()),
    Clean("streamed-once", _streamed_once()),
    Clean("gpu-each", _gpu_each()),
)
