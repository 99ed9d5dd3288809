"""Many tiny migrations: when they are a matter, and what is advised for each way that memory moves."""

import pytest
from exports import (
    CPU_FAULTS,
    DTOH,
    GPU_FAULTS,
    KERNEL,
    KIB,
    MEMCPY,
    MEMORY,
    MIB,
    RUNTIME,
    USER,
    VA,
    Export,
    api_call,
    cpu_fault,
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

from nsan.analysis.advisor.advice import Silent
from nsan.analysis.advisor.rules.small_copies import tiny_migrations
from nsan.asking import Asked

US = 1_000
MS = 1_000 * US
BLOCK = 2 * MIB
PIECE = 64 * KIB
N = 40
STEP = 150 * US
TAKES = 10 * US
"""What a copy of 64 KiB takes: 6.55 GB/s."""

SLICE = N * PIECE * (100 - 10) * US // (BLOCK - PIECE)
"""What all pieces take at the rate of the line through the two sizes."""


def whole(size=512 * MIB):
    """An allocation, and one large copy: with those of 64 KiB in 10 us they fit a line of 22.57 GB/s."""
    export = Export().add(MEMORY, memory_event(0, VA, size))
    return export.add(MEMCPY, migration(50 * MS, 50 * MS + 100 * US, BLOCK, VA + size, cause=USER))


@pytest.fixture
def ask(built):
    return lambda export: list(tiny_migrations(Asked(built(export))))


def test_a_gather_over_many_blocks_is_to_be_packed(ask):
    export = whole().add(KERNEL, kernel(MS, MS + N * STEP))
    for i in range(N):
        start = MS + i * STEP
        export.add(GPU_FAULTS, gpu_fault(start, start + 80 * US, VA + i * BLOCK))
        export.add(MEMCPY, migration(start + 60 * US, start + 70 * US, PIECE, VA + i * BLOCK))
    (advice,) = ask(export)
    assert advice.title.startswith("Pack what `add` uses of allocation 0")
    # 40 batches of 80 us, and 2 us of each access, wait 3.28 ms; 2.5 MiB at 22.57 GB/s take 116 us.
    assert advice.gain.ns == pytest.approx(N * 82 * US - SLICE, abs=500)
    assert advice.gain.kind == "derived"


def test_prefetches_in_pieces_are_to_be_one_call(ask):
    export = whole(8 * MIB)
    export.strings[7] = "cudaMemPrefetchAsync_v8000"
    for i in range(N):
        start = MS + i * 50 * US
        export.add(RUNTIME, api_call(start, start + 40 * US, name=7, correlation=i + 1))
        row = migration(start + 25 * US, start + 35 * US, PIECE, VA + i * PIECE, cause=USER)
        export.add(MEMCPY, row)
    (advice,) = ask(export)
    assert advice.title.endswith("in one call")
    assert f"cudaMemPrefetchAsync(p0, {8 * MIB}, 0, stream);" in advice.calls
    # From the first call to the last copy 39 steps and 35 us; 2.5 MiB at 22.57 GB/s take 116 us.
    assert advice.gain.ns == pytest.approx(39 * 50 * US + 35 * US - SLICE, abs=500)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_calls_for_a_part_of_a_va_block_are_small_and_kernels_between_are_none_of_their_time(
    ask, is_interleaved
):
    export = whole(128 * MIB)
    export.strings[7] = "cudaMemPrefetchAsync_v8000"
    for i in range(N):
        start = MS + i * 500 * US
        export.add(RUNTIME, api_call(start, start + 72 * US, name=7, correlation=i + 1))
        row = migration(start + 10 * US, start + 70 * US, MIB, VA + i * BLOCK, cause=USER)
        export.add(MEMCPY, row)
        if is_interleaved:
            export.add(KERNEL, kernel(start + 72 * US, start + 500 * US, correlation=100 + i))
    export.add(RUNTIME, api_call(49 * MS, 51 * MS, name=7, correlation=N + 1))
    found = ask(export)
    if is_interleaved:
        # 40 MiB in 40 times 72 us are 14.6 GB/s, more than half of the 26.2 GB/s that the two sizes show.
        assert isinstance(found[0], Silent)
    else:
        assert found[0].title.endswith("in one call")
        assert "40 steps of 1.00 MiB or less" in found[0].finding


def test_what_the_cpu_takes_piece_by_piece_is_to_be_prefetched_to_it(ask):
    export = whole()
    # A copy out that shows the link's rate, of other memory.
    export.add(
        MEMCPY,
        migration(60 * MS, 60 * MS + 100 * US, BLOCK, VA + 1024 * MIB, kind=DTOH, cause=USER),
    )
    for i in range(N):
        start = MS + i * STEP
        export.add(CPU_FAULTS, cpu_fault(start, VA + i * BLOCK))
        export.add(
            MEMCPY, migration(start + 30 * US, start + 40 * US, PIECE, VA + i * BLOCK, kind=DTOH)
        )
    (advice,) = ask(export)
    assert "to the CPU" in advice.title
    assert f"cudaMemPrefetchAsync(p0, {512 * MIB}, cudaCpuDeviceId, stream);" in advice.calls
    # 40 us from each fault to the end of its copy, perhaps with the return of the fault.
    assert N * 40 * US - SLICE - 500 <= advice.gain.ns <= N * 50 * US


@pytest.mark.parametrize(("n", "piece"), [(20, PIECE), (N, MIB)])
def test_few_or_large_copies_are_no_matter(ask, n, piece):
    export = whole().add(KERNEL, kernel(MS, MS + N * STEP))
    for i in range(n):
        start = MS + i * STEP
        export.add(GPU_FAULTS, gpu_fault(start, start + 80 * US, VA + i * BLOCK))
        export.add(MEMCPY, migration(start + 20 * US, start + 70 * US, piece, VA + i * BLOCK))
    (silent,) = ask(export)
    assert isinstance(silent, Silent)
    assert silent.is_known


def test_without_migrations_nothing_is_said(ask):
    (silent,) = ask(Export(options={"COLLECT_CUDA_TRACE": "false"}))
    assert isinstance(silent, Silent)
    assert not silent.is_known
