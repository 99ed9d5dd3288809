"""Prefetches of the program that do harm: pushed out unused, pushing out what is needed, late, or for nothing."""

import pytest
from exports import (
    DTOH,
    EVICTION,
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
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

from nsan.analysis.advisor.advice import Silent
from nsan.analysis.advisor.rules.prefetch_harm import prefetch_harm
from nsan.asking import Asked

US = 1_000
MS = 1_000 * US
BLOCK = 2 * MIB
OTHER = VA + 64 * MIB
N = 4
CALL = 7


def start_of(*sizes):
    export = Export()
    export.strings[CALL] = "cudaMemPrefetchAsync_v8000"
    for va, size in zip((VA, OTHER), sizes, strict=False):
        export.add(MEMORY, memory_event(0, va, size))
    return export


def prefetch(export, at, *, va=VA, n=N, evicts=None):
    """A call of 100 us per block: each evicts a block first, if asked, and brings one."""
    export.add(RUNTIME, api_call(at, at + n * 100 * US, name=CALL, correlation=at))
    for i in range(n):
        start = at + i * 100 * US + 10 * US
        if evicts is not None:
            out = migration(
                start, start + 30 * US, BLOCK, evicts + i * BLOCK, kind=DTOH, cause=EVICTION
            )
            export.add(MEMCPY, out)
        export.add(
            MEMCPY, migration(start + 40 * US, start + 90 * US, BLOCK, va + i * BLOCK, cause=USER)
        )


def faulted(export, at, *, va, n=N, evicts=None):
    """A kernel whose batches of 100 us bring a block each, and evict one, if asked."""
    for i in range(n):
        start = at + i * 100 * US
        export.add(GPU_FAULTS, gpu_fault(start, start + 100 * US, va + i * BLOCK))
        if evicts is not None:
            out = migration(
                start + 5 * US,
                start + 30 * US,
                BLOCK,
                evicts + i * BLOCK,
                kind=DTOH,
                cause=EVICTION,
            )
            export.add(MEMCPY, out)
        export.add(MEMCPY, migration(start + 40 * US, start + 90 * US, BLOCK, va + i * BLOCK))
    export.add(KERNEL, kernel(at, at + n * 100 * US, correlation=at))


@pytest.fixture
def ask(built):
    return lambda export: list(prefetch_harm(Asked(built(export))))


def test_a_prefetch_that_pushes_out_what_faults_bring_back_is_to_be_left_out(ask):
    export = start_of(N * BLOCK, N * BLOCK)
    faulted(export, MS, va=OTHER)
    for at in (2 * MS, 4 * MS):
        prefetch(export, at, evicts=OTHER)
        faulted(export, at + N * 100 * US + 10 * US, va=OTHER, evicts=VA)
    (advice,) = ask(export)
    assert advice.target.va == VA
    assert advice.title.startswith("Leave out the prefetch of allocation 0")
    # Twice 400 us of calls and 10 us up to the kernel; twice 4 batches of 100 us bring the other back, and 2 us end it.
    assert advice.gain.ns == 2 * (410 + 402) * US
    assert [change.kind for change in advice.changes] == ["no_prefetch"]


def test_what_is_evicted_before_any_kernel_runs_is_too_much(ask):
    export = start_of(N * BLOCK)
    prefetch(export, MS)
    at = MS + N * 100 * US
    export.add(MEMCPY, migration(at, at + 50 * US, 2 * BLOCK, VA, kind=DTOH, cause=EVICTION))
    export.add(KERNEL, kernel(at + 60 * US, at + 200 * US))
    (advice,) = ask(export)
    assert "only what fits" in advice.title
    assert "4.00 MiB (50%)" in advice.finding
    # At most all of the 400 us in which the call, and 60 us in which its evictions, kept the GPU.
    assert advice.gain.ns <= 460 * US


def test_a_prefetch_beside_the_kernel_that_uses_the_memory_comes_late(ask):
    export = start_of(N * BLOCK)
    export.add(KERNEL, kernel(MS, 2 * MS))
    export.add(RUNTIME, api_call(MS + 20 * US, MS + 900 * US, name=CALL))
    for i in range(N):
        start, va = MS + 50 * US + i * 200 * US, VA + i * BLOCK
        export.add(GPU_FAULTS, gpu_fault(start, start + 100 * US, va))
        export.add(MEMCPY, migration(start + 40 * US, start + 90 * US, MIB, va))
        late = migration(start + 110 * US, start + 160 * US, MIB, va + MIB, cause=USER)
        export.add(MEMCPY, late)
    (advice,) = ask(export)
    assert advice.title.startswith("Prefetch allocation 0 (8.00 MiB")
    assert "earlier" in advice.title
    # Faults wait in the kernel 4 times 100 us.
    assert advice.gain.ns == 400 * US


def test_a_prefetch_in_time_is_left_alone(ask):
    export = start_of(N * BLOCK)
    prefetch(export, MS)
    export.add(KERNEL, kernel(2 * MS, 3 * MS))
    (silent,) = ask(export)
    assert isinstance(silent, Silent)
    assert silent.is_known
    assert "in time" in silent.reason


def idle_calls(export, n, *, took):
    """Calls without a copy, beside one with copies and a kernel that ends at 3 ms."""
    prefetch(export, MS)
    export.add(KERNEL, kernel(2 * MS, 3 * MS))
    for i in range(n):
        at = 3 * MS + i * MS
        export.add(RUNTIME, api_call(at, at + took, name=CALL, correlation=at))
    return export


def test_calls_that_move_nothing_are_named_but_no_matter(ask):
    (advice,) = ask(idle_calls(start_of(N * BLOCK), 3, took=50 * US))
    assert advice.level == "info"
    assert advice.title == "Look at 3 prefetch calls that moved nothing"
    assert advice.gain.ns == 150 * US


@pytest.mark.parametrize(("n", "took"), [(1, 500 * US), (3, 5 * US)])
def test_one_call_that_makes_pages_or_calls_that_take_no_time_are_not_worth_a_word(ask, n, took):
    (said,) = ask(idle_calls(start_of(N * BLOCK), n, took=took))
    assert isinstance(said, Silent)


def test_what_is_evicted_and_comes_back_by_faults_is_not_said_to_push_out_others(ask):
    export = start_of(N * BLOCK)
    for at in (2 * MS, 4 * MS):
        prefetch(export, at)
        for i in range(N):
            start = at + 410 * US + i * 20 * US
            out = migration(
                start, start + 15 * US, BLOCK, VA + i * BLOCK, kind=DTOH, cause=EVICTION
            )
            export.add(MEMCPY, out)
        export.add(KERNEL, kernel(at + 405 * US, at + 500 * US, correlation=at + 1))
        faulted(export, at + 600 * US, va=VA)
    (advice,) = ask(export)
    assert advice.title.endswith("it is evicted, and page faults bring it again")
    assert "pushed" not in advice.finding
    assert "16.00 MiB were evicted" in advice.finding


def test_allocations_that_push_out_each_other_get_one_advice(ask):
    export = start_of(N * BLOCK, N * BLOCK)
    for at in (2 * MS, 6 * MS):
        # The second call pushes out the first, and then the faults of each kernel what the other needs.
        prefetch(export, at)
        prefetch(export, at + 500 * US, va=OTHER, evicts=VA)
        faulted(export, at + 1_000 * US, va=VA, evicts=OTHER)
        faulted(export, at + 1_500 * US, va=OTHER, evicts=VA)
    (advice,) = ask(export)
    assert advice.title.endswith("each just ahead of the kernel that uses it, not all at once")
    assert {target.va for target in advice.targets} == {VA, OTHER}
    assert (
        sorted(change.kind for change in advice.changes) == ["no_prefetch"] * 2 + ["prefetch"] * 2
    )
    # Each time 1 ms from the first call to the kernel, and 8 batches of 100 us that evict and bring back.
    assert advice.gain.ns == pytest.approx(2 * (1_000 + 800) * US, rel=0.02)


def test_a_program_without_prefetches_has_none_to_leave_out(ask):
    export = start_of(N * BLOCK)
    faulted(export, MS, va=VA)
    (silent,) = ask(export)
    assert isinstance(silent, Silent)
    assert silent.is_known
