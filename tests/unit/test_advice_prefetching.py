"""Prefetch before use: for which kernel and which memory it is advised, how much it may gain, and when not."""

import pytest
from exports import (
    CPU_FAULTS,
    DTOH,
    EVICTION,
    GPU_FAULTS,
    HTOD,
    KERNEL,
    KIB,
    MEMCPY,
    MEMORY,
    MIB,
    VA,
    WRITE,
    Export,
    cpu_fault,
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

from nsan.analysis.advisor.advice import Advice, Silent
from nsan.analysis.advisor.rules.prefetching import before_use
from nsan.asking import Asked

US = 1_000
MS = 1_000 * US
OTHER = VA + 64 * MIB
COPY = 100 * US
"""What a copy of 1 MiB takes here: 10.49 GB/s."""

LEAD = 40 * US
"""From a fault to its copy."""


def named(**names):
    """An export whose strings are kernels: by number k1, k2."""
    export = Export()
    export.strings |= {int(key[1:]): name for key, name in names.items()}
    return export


def waits(export, start, n, va=VA, *, name=1, rows=True, size=MIB, alone=0):
    """Let a kernel fault n times for 1 MiB each; it computes alone for some time at its end."""
    end = start
    for i in range(n):
        begin = start + i * (LEAD + COPY)
        end = begin + LEAD + COPY
        if rows:
            export.add(GPU_FAULTS, gpu_fault(begin, end, va + i * size))
        export.add(MEMCPY, migration(begin + LEAD, end, size, va + i * size))
    export.add(KERNEL, kernel(start, end + alone, name=name, correlation=start))
    return export


def allocated(export, size, va=VA, **more):
    return export.add(MEMORY, memory_event(0, va, size, **more))


@pytest.fixture
def ask(built):
    def asked(export, **filters):
        return list(before_use(Asked(built(export), filters=filters)))

    return asked


def test_the_bound_is_the_time_in_which_faults_waited_less_one_copy(ask):
    export = allocated(waits(Export(), MS, 8, alone=500 * US), 8 * MIB)
    (advice,) = ask(export)
    # 8 times 140 us of waiting; 8 MiB at 1 MiB in 100 us take 800 us.
    assert advice.gain.ns == pytest.approx(8 * LEAD, abs=10)
    assert advice.gain.kind == "derived"
    assert advice.target.va == VA
    assert advice.target.bytes == 8 * MIB
    assert f"cudaMemPrefetchAsync(p0, {8 * MIB}, 0, stream);" in advice.calls


def test_each_kernel_gets_the_memory_that_faulted_while_it_ran(ask):
    export = waits(named(k1="first", k2="second"), MS, 6)
    waits(export, 10 * MS, 9, OTHER, name=2)
    allocated(export, 8 * MIB)
    allocated(export, 16 * MIB, OTHER)
    second, first = ask(export)
    assert [each.target.kernel for each in (first, second)] == ["first", "second"]
    assert [[target.va for target in each.targets] for each in (first, second)] == [[VA], [OTHER]]


def test_the_memory_that_brings_most_is_named_first(ask):
    export = waits(waits(named(k1="both"), MS, 2), 10 * MS, 5, OTHER)
    allocated(export, 2 * MIB)
    allocated(export, 5 * MIB, OTHER)
    (advice,) = ask(export)
    assert [target.va for target in advice.targets] == [OTHER, VA]
    assert advice.title.startswith("Prefetch allocation 1 (5.00 MiB")


def test_a_part_of_a_large_allocation_is_prefetched_alone(ask):
    export = allocated(waits(Export(), MS, 4, VA + 8 * MIB), 64 * MIB)
    (advice,) = ask(export)
    assert f"cudaMemPrefetchAsync((char *)p0 + {8 * MIB}, {4 * MIB}, 0, stream);" in advice.calls
    (change,) = advice.changes
    assert (change.offset_bytes, change.n_bytes) == (8 * MIB, 4 * MIB)


def test_memory_of_which_few_pages_are_used_is_not_copied_whole(ask):
    export = Export()
    for i in range(6):
        begin = MS + i * 100 * US
        va = VA + i * 64 * MIB
        export.add(GPU_FAULTS, gpu_fault(begin, begin + 100 * US, va))
        export.add(MEMCPY, migration(begin + 40 * US, begin + 50 * US, 64 * KIB, va))
    export.add(KERNEL, kernel(MS, MS + 600 * US))
    # A large copy elsewhere shows what the link can do: 10.49 GB/s, so 320 MiB take 32 ms.
    export.add(MEMCPY, migration(5 * MS, 5 * MS + COPY, MIB, VA + 1024 * MIB, cause=1))
    (silent,) = ask(allocated(export, 384 * MIB))
    assert isinstance(silent, Silent)
    assert "few pages" in silent.reason


def test_memory_that_nobody_touched_before_needs_no_copy(ask):
    export = Export()
    for i in range(5):
        begin = MS + i * 100 * US
        export.add(GPU_FAULTS, gpu_fault(begin, begin + 100 * US, VA + i * MIB, access=WRITE))
    export.add(KERNEL, kernel(MS, 2 * MS))
    (advice,) = ask(allocated(export, 8 * MIB))
    assert advice.gain.ns == 500 * US
    assert "no byte came" in advice.finding.lower()
    assert f"cudaMemPrefetchAsync(p0, {8 * MIB}, 0, stream);" in advice.calls


def test_where_a_kernel_evicts_a_prefetch_is_no_remedy(ask):
    export = allocated(waits(Export(), MS, 8), 8 * MIB)
    export.add(
        MEMCPY,
        migration(MS + 10 * US, MS + 30 * US, MIB, OTHER, kind=DTOH, cause=EVICTION),
    )
    (silent,) = ask(export)
    assert isinstance(silent, Silent)
    assert silent.is_known
    assert "evicted" in silent.reason


def test_without_fault_rows_the_bound_says_that_it_is_reconstructed(ask):
    (advice,) = ask(allocated(waits(Export(), MS, 8, rows=False), 8 * MIB))
    assert advice.gain.kind == "reconstructed"
    assert "at most" in advice.finding
    # The kernel's 1.12 ms less 0.8 ms of copies are all that there is to gain.
    assert 0 < advice.gain.ns <= 8 * LEAD + 10


def test_without_allocations_addresses_are_given_as_guessed(ask):
    (advice,) = ask(waits(Export(), MS, 8))
    assert advice.target.is_guessed
    (line,) = [each for each in advice.calls if each.startswith("cudaMemPrefetchAsync")]
    assert line.startswith(
        f"cudaMemPrefetchAsync(p0, {8 * MIB}, 0, stream);  // p0: what lay at 0x{VA:x}"
    )


def test_without_kernels_which_of_them_waits_is_not_known(ask):
    export = Export()
    export.add(MEMCPY, migration(MS, 2 * MS, MIB, VA, kind=HTOD))
    (silent,) = ask(export)
    assert isinstance(silent, Silent)
    assert not silent.is_known


def test_a_kernel_that_waits_for_nothing_needs_no_prefetch(ask):
    export = Export()
    export.add(KERNEL, kernel(MS, 2 * MS))
    export.add(CPU_FAULTS, cpu_fault(3 * MS, VA))
    export.add(MEMCPY, migration(100 * US, 200 * US, MIB, VA, cause=1))
    (silent,) = ask(export)
    assert isinstance(silent, Silent)
    assert silent.is_known


def test_the_gate_asks_for_half_of_what_the_kernel_is_of_all_waiting(ask):
    export = waits(named(k1="first", k2="second"), MS, 6)
    waits(export, 10 * MS, 18, OTHER, name=2)
    allocated(export, 8 * MIB)
    allocated(export, 32 * MIB, OTHER)
    second, first = ask(export)
    # Of 24 waits alike 18 and 6.
    assert (second.gate, first.gate) == ("kernels.waiting_ns>-37%", "kernels.waiting_ns>-12%")


def test_where_the_rate_of_the_link_is_not_known_no_copy_is_taken_off(ask):
    export = allocated(Export(), 64 * MIB)
    for i in range(6):
        begin = MS + i * 100 * US
        export.add(GPU_FAULTS, gpu_fault(begin, begin + 100 * US, VA + i * 64 * KIB))
        small = migration(begin + 40 * US, begin + 50 * US, 64 * KIB, VA + i * 64 * KIB)
        export.add(MEMCPY, small)
    export.add(KERNEL, kernel(MS, MS + 600 * US))
    (advice,) = ask(export)
    assert advice.gain.ns == 600 * US
    assert "less" not in advice.gain.how
    assert not [each for each in advice.numbers if "copy" in each.label]


def test_what_lies_in_no_allocation_is_told_apart(ask):
    export = waits(waits(Export(), MS, 6), 10 * MS, 2, OTHER)
    (advice,) = ask(allocated(export, 6 * MIB))
    assert "brought 8.00 MiB that lay elsewhere, 6.00 MiB of it of this memory" in advice.finding


def test_memory_that_bounces_is_no_target(ask):
    export = waits(Export(), MS, 8)
    for i in range(6):
        begin = 5 * MS + i * 400 * US
        export.add(GPU_FAULTS, gpu_fault(begin, begin + 100 * US, OTHER, access=WRITE))
        export.add(MEMCPY, migration(begin + 40 * US, begin + 90 * US, 64 * KIB, OTHER))
        export.add(CPU_FAULTS, cpu_fault(begin + 150 * US, OTHER))
        out = migration(begin + 180 * US, begin + 200 * US, 64 * KIB, OTHER, kind=DTOH)
        export.add(MEMCPY, out)
    export.add(KERNEL, kernel(5 * MS, 8 * MS, correlation=2))
    allocated(export, 8 * MIB)
    allocated(export, 64 * KIB, OTHER)
    (advice,) = ask(export)
    assert [target.va for target in advice.targets] == [VA]


def test_a_hostile_kernel_name_does_not_leave_its_line(ask):
    export = allocated(waits(named(k1="x\n*/ system();\x1b[2J"), MS, 8), 8 * MIB)
    (advice,) = ask(export)
    assert isinstance(advice, Advice)
    said = [advice.title, advice.finding, *advice.calls, advice.check]
    assert not any("\n" in each or "\x1b" in each for each in said)
