"""First touch on the wrong side: only where fault rows show that the GPU writes what the CPU filled."""

from pathlib import Path

import pytest
from exports import (
    ATOMIC,
    CPU_FAULTS,
    DTOH,
    EVICTION,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    MEMORY,
    MIB,
    READ,
    RUNTIME,
    VA,
    WRITE,
    Export,
    api_call,
    cpu_fault,
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

from nsan.analysis.advisor.advice import Silent
from nsan.analysis.advisor.rules.first_touch import first_touch_side
from nsan.asking import Asked

US = 1_000
MS = 1_000 * US
N = 8
REPOSITORY = Path(__file__).parents[2]


def filled(accesses, *, cpu=True, **more):
    """Memory that the CPU fills in 8 steps of 50 us, and that 8 batches of 100 us bring to a kernel."""
    export = Export(**more).add(MEMORY, memory_event(0, VA, N * MIB))
    if cpu:
        for i in range(N):
            export.add(CPU_FAULTS, cpu_fault(MS + i * 50 * US, VA + i * MIB))
    export.add(RUNTIME, api_call(4 * MS, 4 * MS + US, name=3))
    for i, access in enumerate(accesses):
        start = 5 * MS + i * 100 * US
        export.add(GPU_FAULTS, gpu_fault(start, start + 100 * US, VA + i * MIB, access=access))
        export.add(MEMCPY, migration(start + 40 * US, start + 90 * US, MIB, VA + i * MIB))
    return export.add(KERNEL, kernel(5 * MS, 6 * MS))


@pytest.fixture
def ask(built):
    return lambda export: list(first_touch_side(Asked(built(export))))


def test_memory_that_all_faults_write_is_to_be_filled_on_the_gpu(ask):
    (advice,) = ask(filled([WRITE] * N))
    assert advice.target.va == VA
    assert advice.title.startswith("Fill allocation 0 (8.00 MiB")
    # Kernels wait 8 times 100 us, and 2 us for the last access; the CPU fills 8 times 50 us, the last time not longer
    # than any other.
    assert advice.gain.ns == N * 100 * US + 2 * US + N * 50 * US
    assert any("cudaMemsetAsync(p0, 0, 8388608, stream)" in line for line in advice.calls)
    assert [change.kind for change in advice.changes] == ["first_touch"]


@pytest.mark.parametrize("other", [READ, ATOMIC])
def test_one_fault_that_reads_speaks_against_it(ask, other):
    (silent,) = ask(filled([WRITE] * (N - 1) + [other]))
    assert isinstance(silent, Silent)
    assert silent.is_known


def test_without_cpu_faults_the_gain_says_what_is_not_in_it(ask):
    export = filled([WRITE] * N, cpu=False, options={"COLLECT_UVM_CPU_PAGE_FAULTS": "false"})
    (advice,) = ask(export)
    assert advice.gain.ns == N * 100 * US + 2 * US
    assert "not recorded" in advice.gain.how


def test_without_fault_rows_nobody_knows_what_was_written(ask):
    export = filled([WRITE] * N, options={"COLLECT_UVM_GPU_PAGE_FAULTS": "false"})
    del export.rows[GPU_FAULTS]
    (silent,) = ask(export)
    assert isinstance(silent, Silent)
    assert not silent.is_known


def test_memory_that_moves_but_little_of_it_is_left_alone(ask):
    export = filled([WRITE] * N)
    export.rows[MEMORY] = [memory_event(0, VA, 64 * MIB)]
    (silent,) = ask(export)
    assert isinstance(silent, Silent)


def test_what_a_gpu_touched_first_and_an_eviction_took_away_is_not_the_cpus(built):
    # Eight batches write memory that nobody had; all of it is evicted, and eight batches bring it back to be written.
    export = Export().add(MEMORY, memory_event(0, VA, N * MIB))
    export.options["COLLECT_UVM_CPU_PAGE_FAULTS"] = "false"
    for i in range(N):
        start, va = MS + i * 100 * US, VA + i * MIB
        export.add(GPU_FAULTS, gpu_fault(start, start + 100 * US, va, access=WRITE))
        gone = migration(3 * MS + i * 100 * US, 3 * MS + i * 100 * US + 50 * US, MIB, va, kind=DTOH)
        export.add(MEMCPY, gone | {"migrationCause": EVICTION})
        back = 5 * MS + i * 100 * US
        export.add(GPU_FAULTS, gpu_fault(back, back + 100 * US, va, access=WRITE))
        export.add(MEMCPY, migration(back + 40 * US, back + 90 * US, MIB, va))
    export.add(KERNEL, kernel(MS, 2 * MS), kernel(5 * MS, 6 * MS))
    (silent,) = list(first_touch_side(Asked(built(export))))
    assert silent == Silent(
        "first_touch_side", "No memory came from the CPU only for a kernel to write it."
    )


def test_what_the_cpu_took_from_a_gpu_before_it_came_is_not_the_cpus(ask):
    export = filled([WRITE] * N, cpu=False, options={"COLLECT_UVM_CPU_PAGE_FAULTS": "false"})
    for i in range(N):
        start = 2 * MS + i * 60 * US
        export.add(MEMCPY, migration(start, start + 50 * US, MIB, VA + i * MIB, kind=DTOH))
    (silent,) = ask(export)
    assert isinstance(silent, Silent)


def test_memory_on_which_the_cpu_never_faulted_was_not_filled_by_it(ask):
    (silent,) = ask(filled([WRITE] * N, cpu=False).add(CPU_FAULTS, cpu_fault(MS, VA - 8 * MIB)))
    assert isinstance(silent, Silent)


def test_tensors_of_the_sample_that_kernels_wrote_first_are_not_filled_by_the_cpu():
    # Of its 64 MiB tensor, plain SQL says: faults that copy nothing at 122 ms, an eviction at 243 ms, back at 282 ms.
    found = first_touch_side(Asked(REPOSITORY / "sample_data/model/pca_on/pca_on.sqlite"))
    assert [type(each) for each in found] == [Silent]
