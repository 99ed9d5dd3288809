"""Capacity thrash: by how much what is in use is too large, and when nothing is said."""

import pytest
from exports import (
    DTOH,
    EVICTION,
    GPU_FAULTS,
    KERNEL,
    MEMCPY,
    MEMORY,
    MIB,
    NVTX,
    USER,
    VA,
    Export,
    gpu_fault,
    kernel,
    memory_event,
    migration,
    nvtx,
)

from nsan.analysis.advisor.advice import Silent
from nsan.analysis.advisor.rules.capacity import capacity_thrash
from nsan.asking import Asked

US = 1_000
MS = 1_000 * US
BLOCK = 2 * MIB
SERVICE = 100 * US


def swept(n_blocks=4, n_steps=2, room=2, *, steps=True, cause=2):
    """Go over blocks step by step on a GPU that has room for few: the one that came first leaves."""
    export = Export().add(MEMORY, memory_event(0, VA, n_blocks * BLOCK))
    held, start = [], 0
    for i in range(n_steps):
        begin = start + MS // 2
        for block in range(n_blocks):
            start += MS
            va = VA + block * BLOCK
            if va in held:
                continue
            export.add(GPU_FAULTS, gpu_fault(start, start + SERVICE, va))
            if len(held) == room:
                gone = migration(
                    start + 10 * US,
                    start + 40 * US,
                    BLOCK,
                    held.pop(0),
                    kind=DTOH,
                    cause=EVICTION if cause else 0,
                )
                export.add(MEMCPY, gone)
            export.add(MEMCPY, migration(start + 50 * US, start + 90 * US, BLOCK, va, cause=cause))
            held.append(va)
        export.add(KERNEL, kernel(begin + 10 * US, start + 200 * US, correlation=i))
        if steps:
            export.add(NVTX, nvtx(begin, start + 300 * US, "step"))
    return export


@pytest.fixture
def ask(built):
    """Ask the rule about an export that a test has put together."""
    return lambda export, **filters: list(capacity_thrash(Asked(built(export), filters=filters)))


def values(advice):
    return {each.label: each.value for each in advice.numbers}


def test_a_step_that_does_not_fit_is_too_large_by_what_is_missing(ask):
    (advice,) = ask(swept())
    # In come 8 blocks, 2 stay: 6 are evicted. In the second step 4 come that had been evicted.
    assert values(advice) == {
        "evicted": 6 * BLOCK,
        "of that came back": 4 * BLOCK,
        "one step works on at least": 4 * BLOCK,
        "room that was there at least": 2 * BLOCK,
        "page faults waited": 6 * SERVICE,
    }
    assert "12.00 MiB were evicted from GPU 0" in advice.finding
    assert "8.00 MiB (67%) came back" in advice.finding
    assert "A step (`step`) works on at least 8.00 MiB" in advice.finding
    assert "room for about 4.00 MiB: 4.00 MiB too much" in advice.finding
    assert "shrink by at least 4.00 MiB, to 50% of what it is:" in advice.remedy


def test_it_names_the_allocation_and_the_kernel(ask):
    (advice,) = ask(swept())
    assert (advice.target.va, advice.target.kernel) == (VA, "add")
    assert advice.title.startswith("Make allocation 0 (8.00 MiB at 0x7f0000000000) fit")
    assert advice.calls[0].startswith("for (chunk = 0; chunk < 2; ++chunk)")
    assert "at most 4194304 byte" in advice.calls[0]


def test_the_gain_is_at_most_the_batches_that_evicted_or_brought_back(ask):
    (advice,) = ask(swept(n_steps=3))
    # Only the first two batches of the first step found room.
    assert (advice.gain.ns, advice.gain.kind) == (10 * SERVICE, "derived")


def test_without_fault_rows_the_gain_is_reconstructed(ask):
    export = swept()
    export.rows.pop(GPU_FAULTS)
    export.options["COLLECT_UVM_GPU_PAGE_FAULTS"] = "false"
    (advice,) = ask(export)
    # Each of six batches began at most 200 us before its copy of 40 us.
    assert (advice.gain.ns, advice.gain.kind) == (6 * 240 * US, "reconstructed")


def test_it_says_that_prefetching_makes_no_room(ask):
    (advice,) = ask(swept())
    assert "Prefetching makes no room" in advice.remedy


def test_prefetches_that_bring_back_what_was_evicted_count(ask):
    export = swept(n_steps=1)
    (said,) = ask(export)
    assert isinstance(said, Silent)
    start = 100 * MS
    for i in range(2):
        begin = start + i * MS
        export.add(MEMCPY, migration(begin, begin + 300 * US, BLOCK, VA + i * BLOCK, cause=USER))
    (advice,) = ask(export)
    # Two batches evicted, and two prefetches of 300 us brought back what was evicted.
    assert advice.gain.ns == 2 * SERVICE + 2 * 300 * US


def test_steps_that_fit_one_by_one_do_not_fit_together(ask):
    export = swept(n_blocks=4, n_steps=2, steps=False)
    for i in range(4):
        begin = (2 * i + 1) * MS - 100 * US
        export.add(NVTX, nvtx(begin, begin + 1500 * US, "half"))
    (advice,) = ask(export)
    assert values(advice)["one step works on at least"] == 2 * BLOCK
    assert "Each step (`half`) works on 4.00 MiB or more and fits" in advice.finding
    assert "not together with what the next one uses" in advice.finding


def test_without_steps_all_memory_is_set_against_the_room(ask):
    export = swept(steps=False)
    export.rows.pop(KERNEL)
    (advice,) = ask(export)
    assert "8.00 MiB of managed memory share room for 4.00 MiB" in advice.finding.replace(
        "about ", ""
    )
    assert advice.target.kernel == ""


def test_another_array_that_is_large_enough_may_stay_at_the_cpu(ask):
    export = swept(n_blocks=4)
    export.rows[MEMORY] = [
        memory_event(0, VA, 2 * BLOCK),
        memory_event(1, VA + 2 * BLOCK, 2 * BLOCK),
    ]
    (advice,) = ask(export)
    assert len(advice.targets) == 2
    assert (
        f"cudaMemAdvise(p{advice.targets[1].allocation_id}, 4194304, cudaMemAdviseSetPreferredLocation, cudaCpuDeviceId);"
        in advice.calls
    )


def test_what_is_evicted_and_not_needed_again_is_no_thrash(ask):
    (said,) = ask(swept(n_blocks=8, n_steps=1))
    assert said == Silent(
        "capacity_thrash",
        "12.00 MiB were evicted, and 0% came back: little that is evicted is needed again.",
    )


def test_what_fits_is_no_thrash(ask):
    (said,) = ask(swept(room=4))
    assert said == Silent("capacity_thrash", "Nothing was evicted: GPU memory was never full.")


def test_without_causes_evictions_are_not_known(ask):
    (said,) = ask(swept(cause=0))
    assert not said.is_known
    assert "does not say why memory moved" in said.reason


def test_a_part_of_a_capture_does_not_tell(ask):
    (said,) = ask(swept(), time=(MS, 3 * MS))
    assert not said.is_known
