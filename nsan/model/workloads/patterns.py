"""Small programs, one per access pattern or habit: what tutorials, benchmarks and sample_data show."""

from __future__ import annotations

from typing import Final

from nsan.model.access import Broadcast, Chase, Matrix, Random, Stencil, Stream, Strided, Zipf
from nsan.model.program import (
    CPU,
    Advise,
    Allocate,
    Free,
    HostTouch,
    HostWait,
    Kernel,
    Launch,
    Mark,
    Operation,
    PopRange,
    Prefetch,
    Program,
    PushRange,
    Synchronize,
)
from nsan.model.size import Size, Workload
from nsan.units import KIB

THREADS: Final = 256
ONE_THREAD_NS_PER_MIB: Final = 12_100_000.0
"""One thread's computing (calibration.md 5: 12.04 to 12.16 ms/MiB)."""


def _blocks(n_bytes: int, element: int = 4) -> int:
    return max(-(-n_bytes // (THREADS * element)), 1)


def _prefetched(size: Size, arrays: tuple[str, ...], launch: Launch) -> list[Operation]:
    """Launch with the user's prefetches around it."""
    ahead: list[Operation] = [Prefetch(name, launch.device) for name in arrays]
    if size.prefetch in ("ahead", "back"):
        return [*ahead, launch, Synchronize()]
    if size.prefetch == "late":
        return [launch, *ahead, Synchronize()]
    return [launch, Synchronize()]


def _read_back(size: Size, array: str) -> list[Operation]:
    back: list[Operation] = [Prefetch(array, CPU), Synchronize()] if size.prefetch == "back" else []
    return [*back, HostTouch(array)]


def vector_add(
    n_bytes: int,
    grid: int,
    *,
    threads: int = THREADS,
    prefetch: str = "none",
    descending: bool = False,
) -> Program:
    """``y[i] = x[i] + y[i]`` over two arrays of ``n_bytes`` each, as in most public captures.

    Parameters
    ----------
    n_bytes : int
        Bytes of each array.
    grid, threads : int
        Thread blocks and threads in each; 1 x 1 and 1 x 256 are what tutorials begin with.
    prefetch : str, default "none"
        As in ``Size``.
    descending : bool, default False
        The second array lies lower.
    """
    compute = ONE_THREAD_NS_PER_MIB if threads == 1 else 200_000.0
    kernel = Kernel(
        "add(int, float *, float *)",
        grid,
        threads,
        (Stream(allocation="x"), Stream(allocation="y")),
        compute_ns_per_mib=compute,
    )
    size = Size(prefetch=prefetch)
    return Program(
        "vector_add",
        (
            Allocate("x", n_bytes),
            Allocate("y", n_bytes),
            HostTouch("x", write=True),
            HostTouch("y", write=True),
            *_prefetched(size, ("x", "y"), Launch(kernel)),
            *_read_back(size, "y"),
            Free("x"),
            Free("y"),
        ),
        descending=descending,
    )


def hotspot(n: int, *, host_delay_ns: int = 0, descending: bool = False) -> Program:
    """Rodinia's hotspot on ``n`` x ``n`` floats: two arrays read, one only written by the GPU.

    The host reads the result without waiting for the kernel, as the traces of ../nvprof show.

    Parameters
    ----------
    n : int
        Rows and columns.
    host_delay_ns : int
        From the launch to the host's first read, ns.
    descending : bool, default False
        Later arrays lie lower.
    """
    tiles = -(-n // 12)
    temperature = Stencil(allocation="temperature", width=n, height=n, tile=12, halo=2)
    power = Stencil(allocation="power", width=n, height=n, tile=12, halo=2)
    result = Stencil(allocation="result", width=n, height=n, tile=12, write=True, phase=1)
    kernel = Kernel(
        "calculate_temp",
        tiles * tiles,
        256,
        (temperature, power, result),
        compute_ns_per_mib=700_000.0,
    )
    read, written = 89_000_000.0, 178_000_000.0  # fscanf and fprintf of each float, measured
    return Program(
        "hotspot",
        (
            Allocate("temperature", 4 * n * n),
            HostTouch("temperature", write=True, ns_per_mib=read),
            Allocate("power", 4 * n * n),
            HostTouch("power", write=True, ns_per_mib=read),
            Allocate("result", 4 * n * n),
            Launch(kernel),
            HostWait(host_delay_ns),
            HostTouch("result", ns_per_mib=written),
            Synchronize(),
        ),
        descending=descending,
    )


def _stream(size: Size) -> Program:
    half = size.n_bytes // 2
    return vector_add(half, _blocks(half), prefetch=size.prefetch)


def _tutorial(size: Size) -> Program:
    return vector_add(size.n_bytes // 2, 1, prefetch=size.prefetch)


def _steps(size: Size, body: list[Operation]) -> list[Operation]:
    """Repeat the body as NVTX steps."""
    operations: list[Operation] = []
    for i in range(size.iterations):
        operations += [Mark(f"step {i}"), PushRange("step"), *body, PopRange()]
    return operations


def _single(name: str, size: Size, kernel: Kernel, *, read_back: bool = False) -> Program:
    """One array that the host fills and a kernel works on, step by step."""
    body = _prefetched(size, ("data",), Launch(kernel))
    return Program(
        name,
        (
            Allocate("data", size.n_bytes),
            HostTouch("data", write=True),
            *_steps(size, body),
            *(_read_back(size, "data") if read_back else []),
            Free("data"),
        ),
    )


def _strided(size: Size) -> Program:
    stream = Strided(allocation="data", stride_bytes=8 * KIB)
    grid = max(size.n_bytes // (8 * KIB * THREADS), 1)
    return _single("stride", size, Kernel("strided_read", grid, THREADS, (stream,)))


def _random(size: Size) -> Program:
    stream = Random(allocation="data", draws=32, seed=size.seed)
    grid = max(size.n_bytes // (64 * KIB), 1)
    return _single("random", size, Kernel("random_gather", grid, THREADS, (stream,)))


def _zipf(size: Size) -> Program:
    table = size.n_bytes * 7 // 8
    gather = Zipf(allocation="table", draws=32, seed=size.seed)
    out = Stream(allocation="out", write=True, phase=1)
    rest = size.n_bytes - table
    kernel = Kernel("embedding_gather", _blocks(rest), THREADS, (gather, out))
    return Program(
        "zipf",
        (
            Allocate("table", table),
            Allocate("out", rest),
            HostTouch("table", write=True),
            *_steps(size, _prefetched(size, ("table",), Launch(kernel))),
            HostTouch("out"),
        ),
    )


def _matmul(size: Size) -> Program:
    n = max(int((size.n_bytes / 12) ** 0.5) // 32 * 32, 32)
    tiles = n // 32
    kernel = Kernel(
        "matmul",
        tiles * tiles,
        THREADS,
        (
            Matrix(allocation="a", role="A", n=n),
            Matrix(allocation="b", role="B", n=n),
            Matrix(allocation="c", role="C", n=n, write=True, phase=1),
        ),
    )
    return Program(
        "matmul",
        (
            *(Allocate(name, 4 * n * n) for name in "abc"),
            HostTouch("a", write=True),
            HostTouch("b", write=True),
            *_steps(size, _prefetched(size, ("a", "b"), Launch(kernel))),
            *_read_back(size, "c"),
        ),
    )


def _chase(size: Size) -> Program:
    stream = Chase(allocation="data", hops=max(size.n_bytes // (256 * KIB), 16), seed=size.seed)
    kernel = Kernel("pointer_chase", 8, 32, (stream,), compute_ns_per_mib=2_000_000.0)
    return _single("chase", size, kernel)


def _broadcast(size: Size) -> Program:
    kernel = Kernel("broadcast_read", 256, THREADS, (Broadcast(allocation="data"),))
    return _single("broadcast", size, kernel)


def _first_touch(size: Size) -> Program:
    kernel = Kernel(
        "initialise", _blocks(size.n_bytes), THREADS, (Stream(allocation="data", write=True),)
    )
    return Program(
        "first_touch",
        (
            Allocate("data", size.n_bytes),
            Launch(kernel),
            Synchronize(),
            HostTouch("data", n_bytes=max(size.n_bytes // 4, 1)),
            Free("data"),
        ),
    )


def _ping_pong(size: Size) -> Program:
    """Let the host poll a flag that a kernel writes again and again."""
    flag = 64 * KIB
    flags = Stream(allocation="flag", write=True)
    data = Stream(allocation="data")
    kernel = Kernel(
        "producer", 64, THREADS, (data, flags), compute_ns_per_mib=20_000_000.0, repeat=8
    )
    polls: list[Operation] = [HostTouch("flag", ns_per_mib=1_600_000.0) for _ in range(300)]
    return Program(
        "ping_pong",
        (
            Allocate("data", size.n_bytes),
            Allocate("flag", flag),
            HostTouch("data", write=True),
            HostTouch("flag", write=True),
            *_steps(size, [Launch(kernel), *polls, Synchronize()]),
        ),
    )


def _sweep(size: Size) -> Program:
    """Step over everything: where memory is too small, each finds it evicted by the one before."""
    kernel = Kernel(
        "scale", _blocks(size.n_bytes), THREADS, (Stream(allocation="data", write=True),)
    )
    return _single("sweep", size, kernel, read_back=True)


def _advice(size: Size) -> Program:
    """Three arrays under three advices, and a fourth without, read by the host in between."""
    part = size.n_bytes // 4
    names = ("read_mostly", "kept_on_cpu", "mapped", "plain")
    streams = tuple(Stream(allocation=name) for name in names)
    kernel = Kernel("sum_all", _blocks(part), THREADS, streams)
    return Program(
        "advice",
        (
            *(Allocate(name, part) for name in names),
            *(HostTouch(name, write=True) for name in names),
            Advise("read_mostly", "read_mostly"),
            Advise("kept_on_cpu", "preferred_location", CPU),
            Advise("mapped", "preferred_location", CPU),
            Advise("mapped", "accessed_by", 0),
            *_steps(
                size,
                [
                    *_prefetched(size, ("plain",), Launch(kernel)),
                    *(HostTouch(name) for name in names),
                ],
            ),
        ),
    )


def _two_gpus(size: Size) -> Program:
    """GPUs take turns on one array, and each has an array of its own."""
    gpus = range(max(size.n_gpus, 2))
    part = size.n_bytes // (len(gpus) + 1)
    operations: list[Operation] = [Allocate("shared", part)]
    operations += [Allocate(f"own {gpu}", part) for gpu in gpus]
    operations.append(HostTouch("shared", write=True))
    body: list[Operation] = []
    for gpu in gpus:
        streams = (
            Stream(allocation="shared", write=True),
            Stream(allocation=f"own {gpu}", write=True),
        )
        body += [
            Launch(Kernel(f"stage_{gpu}", _blocks(part), THREADS, streams), gpu),
            Synchronize(),
        ]
    return Program("two_gpus", (*operations, *_steps(size, body), HostTouch("shared")))


def _churn(size: Size) -> Program:
    """Allocate, use and free in every step, as a program without a caching allocator does."""
    part = size.n_bytes // 4
    kernel = Kernel(
        "layer",
        _blocks(part),
        THREADS,
        (Stream(allocation="w"), Stream(allocation="t", write=True)),
    )
    body: list[Operation] = [Allocate("t", part), Launch(kernel), Synchronize(), Free("t")]
    return Program(
        "churn",
        (Allocate("w", part), HostTouch("w", write=True), *_steps(size, body), HostTouch("w")),
    )


def _hotspot(size: Size) -> Program:
    n = max(int((size.n_bytes / 12) ** 0.5) // 64 * 64, 64)
    return hotspot(n, host_delay_ns=1_000_000)


PATTERNS: Final = (
    Workload(
        "stream", "vector add by many thread blocks over two arrays", _stream, has_steps=False
    ),
    Workload(
        "tutorial",
        "vector add by one thread block: 2 faults in each batch",
        _tutorial,
        has_steps=False,
    ),
    Workload("stride", "one access to every other page", _strided),
    Workload("random", "gather of random elements", _random),
    Workload("zipf", "gather of embedding rows, few of them often", _zipf),
    Workload(
        "hotspot",
        "stencil; the host reads the result beside the kernel",
        _hotspot,
        has_steps=False,
        has_prefetch=False,
    ),
    Workload("matmul", "tiled matrix product", _matmul),
    Workload("chase", "pointer chases: dependent faults, one at a time", _chase),
    Workload("broadcast", "all thread blocks read the same bytes", _broadcast),
    Workload(
        "first-touch",
        "an array that the GPU touches first",
        _first_touch,
        has_steps=False,
        has_prefetch=False,
    ),
    Workload("ping-pong", "the host polls what a kernel writes", _ping_pong, has_prefetch=False),
    Workload("sweep", "steps over one array, for oversubscription", _sweep),
    Workload("advice", "read-mostly, preferred location, accessed-by, and none", _advice),
    Workload("two-gpus", "GPUs take turns on one array", _two_gpus, has_prefetch=False, gpus=2),
    Workload("churn", "allocate and free in every step", _churn, has_prefetch=False),
)
"""One workload per access pattern, or habit of programs."""
