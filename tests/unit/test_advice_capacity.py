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
RETURN = 2 * US
"""What an access may take before its fault is noted and after the replay, beside each batch of faults."""


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
        "page faults waited": 6 * (SERVICE + RETURN),
    }
    assert "12.00 MiB were evicted from GPU 0" in advice.finding
    assert "8.00 MiB (67%) came back" in advice.finding
    assert "A step (`step`) works on at least 8.00 MiB" in advice.finding
    assert "room for about 4.00 MiB: 4.00 MiB too much" in advice.finding
    assert "shrink: by at least 4.00 MiB, to 50% of what it is." in advice.remedy


def test_it_names_the_allocation_and_the_kernel(ask):
    (advice,) = ask(swept())
    assert (advice.target.va, advice.target.kernel) == (VA, "add")
    assert advice.title.startswith("Make allocation 0 (8.00 MiB at 0x7f0000000000) fit")
    assert advice.calls[0].startswith("for (int chunk = 0; chunk < 2; ++chunk)")
    assert "at most 4194304 byte" in advice.calls[0]


def test_the_gain_is_at_most_the_batches_that_evicted_or_brought_back(ask):
    (advice,) = ask(swept(n_steps=3))
    # Only the first two batches of the first step found room.
    assert (advice.gain.ns, advice.gain.kind) == (10 * (SERVICE + RETURN), "derived")


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
    # Two batches evicted; two copies of 300 us brought it back, and for each the driver worked 200 us before, at most.
    assert advice.gain.ns == 2 * (SERVICE + RETURN) + 2 * 500 * US
    assert advice.gain.kind == "reconstructed"


def test_what_prefetches_evict_counts_with_them(ask):
    export = swept(n_steps=1)
    start = 100 * MS
    # Room for one block: the prefetch of the first pushes the third out, and that of the second the first.
    for i, gone in enumerate((2, 0)):
        begin, out, own = start + i * 600 * US, VA + gone * BLOCK, VA + i * BLOCK
        export.add(
            MEMCPY,
            migration(begin, begin + 100 * US, BLOCK, out, kind=DTOH, cause=EVICTION),
            migration(begin + 200 * US, begin + 300 * US, BLOCK, own, cause=USER),
        )
    (advice,) = ask(export)
    # Each evicts 100 us, pauses 100, and copies 100. They are so close that they are taken as one call: in it the
    # driver began 200 us before the second eviction, at most.
    assert advice.gain.ns == 2 * (SERVICE + RETURN) + 300 * US + 500 * US


def test_an_array_that_fits_alone_has_to_fit_together_with_the_others(ask):
    export = swept(n_blocks=4, room=3)
    export.rows[MEMORY] = [
        memory_event(0, VA, 2 * BLOCK),
        memory_event(1, VA + 2 * BLOCK, 2 * BLOCK),
    ]
    (advice,) = ask(export)
    # Each has 4 MiB, and there is room for 6.
    first, second = (each.label for each in advice.targets)
    assert advice.title == f"Make {first} fit into GPU memory together with {second} for `add`"
    export.rows[MEMORY] = [memory_event(0, VA, 4 * BLOCK)]
    (alone,) = ask(export)
    assert alone.title.startswith(f"Make {alone.target.label} fit into GPU memory in parts")


def test_chunks_are_for_data_that_is_gone_over_in_order(ask):
    (advice,) = ask(swept())
    assert "If kernels go over the data in order, work through it in chunks" in advice.remedy
    assert "If they pick places at random, chunks do not help" in advice.remedy


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
