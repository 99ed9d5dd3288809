"""Results that the CPU takes back by page faults: when a prefetch to the CPU is advised, and how much it may gain."""

import pytest
from exports import (
    CPU_FAULTS,
    DTOH,
    GPU_FAULTS,
    KERNEL,
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
from nsan.analysis.advisor.rules.prefetch_back import prefetch_back
from nsan.asking import Asked

US = 1_000
MS = 1_000 * US
STEP = 150 * US
COPY = 50 * US
"""What a copy of 1 MiB takes: 20.97 GB/s."""


def taken(export, start, n, *, size=MIB, cause=2, faults=True):
    """Let the CPU fault n times, each time for a copy that begins 30 us later."""
    for i in range(n):
        at, va = start + i * STEP, VA + i * size
        if faults:
            export.add(CPU_FAULTS, cpu_fault(at, va))
        begin = at + 30 * US
        export.add(MEMCPY, migration(begin, begin + COPY, size, va, kind=DTOH, cause=cause))
    return export


def allocated(size=16 * MIB):
    return Export().add(MEMORY, memory_event(0, VA, size)).add(KERNEL, kernel(MS, 2 * MS))


@pytest.fixture
def ask(built):
    return lambda export: list(prefetch_back(Asked(built(export))))


def test_the_bound_is_the_time_that_the_cpu_waited_less_one_copy(ask):
    (advice,) = ask(taken(allocated(), 3 * MS, 16))
    assert advice.target.va == VA
    assert f"cudaMemPrefetchAsync(p0, {16 * MIB}, cudaCpuDeviceId, stream);" in advice.calls
    # 16 times 30 us up to the copy; up to 10 us more until the thread goes on.
    assert 16 * 30 * US <= advice.gain.ns <= 16 * 40 * US + 10
    assert advice.gain.kind == "derived"
    # All CPU faults are of this memory: half of them must be gone.
    assert advice.gate == "cpu_faults.n>-50%"
    (change,) = advice.changes
    assert (change.kind, change.device, change.n_bytes) == ("prefetch", -1, None)


def test_a_part_is_fetched_alone(ask):
    (advice,) = ask(taken(allocated(64 * MIB), 3 * MS, 16))
    assert f"cudaMemPrefetchAsync(p0, {16 * MIB}, cudaCpuDeviceId, stream);" in advice.calls
    assert advice.changes[0].n_bytes == 16 * MIB


def test_without_rows_of_cpu_faults_it_is_reconstructed_and_held_by_bytes(ask):
    export = taken(allocated(), 3 * MS, 16, faults=False)
    export.options = {"CUDA_UM_CPU_PAGE_FAULTS": "false"}
    (advice,) = ask(export)
    assert advice.gain.kind == "reconstructed"
    assert advice.gate == "migrations.coherence_bytes>-50%"


@pytest.mark.parametrize(("n", "size"), [(3, 4 * MIB), (32, 64 << 10)])
def test_few_faults_and_less_than_a_va_block_are_no_matter(ask, n, size):
    (silent,) = ask(taken(allocated(), 3 * MS, n, size=size))
    assert isinstance(silent, Silent)
    assert silent.is_known
    assert "would save no time" in silent.reason


def test_a_few_pages_of_a_large_array_are_not_copied_whole(ask):
    export = allocated(1024 * MIB)
    for i in range(8):
        at, va = 3 * MS + i * STEP, VA + i * 128 * MIB
        export.add(CPU_FAULTS, cpu_fault(at, va))
        export.add(MEMCPY, migration(at + 30 * US, at + 30 * US + COPY, MIB, va, kind=DTOH))
    (silent,) = ask(export)
    assert isinstance(silent, Silent)


def test_what_the_program_prefetches_back_is_no_fault(ask):
    (silent,) = ask(taken(allocated(), 3 * MS, 16, cause=USER, faults=False))
    assert isinstance(silent, Silent)
    assert "took nothing" in silent.reason


@pytest.mark.parametrize("is_wanted", [False, True])
def test_prefetches_of_which_no_use_shows_may_be_left_out(ask, is_wanted):
    export = allocated()
    export.strings[7] = "cudaMemPrefetchAsync_v8000"
    for k, start in enumerate((3 * MS, 8 * MS)):
        end = start + 16 * COPY
        export.add(RUNTIME, api_call(start, end, name=7, correlation=k + 1))
        for i in range(16):
            at = start + i * COPY
            export.add(MEMCPY, migration(at, at + COPY, MIB, VA + i * MIB, cause=USER))
        taken(export, start + MS, 16)
    if is_wanted:
        export.add(GPU_FAULTS, gpu_fault(12 * MS, 12 * MS + 50 * US, VA))
    (advice,) = ask(export)
    assert ("leave those calls out instead" in advice.remedy) is not is_wanted


def test_without_causes_what_the_cpu_took_is_not_known(ask):
    (silent,) = ask(taken(allocated(), 3 * MS, 16, cause=0))
    assert isinstance(silent, Silent)
    assert not silent.is_known
