"""What programs do differently: calls, kernels, memory, steps; and what only varies from run to run."""

from __future__ import annotations

import pytest

from nsan.comparing.differs import differences
from nsan.comparing.findings import Side
from nsan.comparing.profile import Profile

GIB = 1 << 30


def run(*, kernels=None, calls=None, memory=None, ranges=None, allocations=2, managed=64 * 2**20):
    summary = {"managed": {"n_allocations": allocations, "bytes": managed}}
    return Profile(
        "run.sqlite",
        summary,
        kernels={"add": 10} if kernels is None else kernels,
        calls={"cudaMallocManaged": 2} if calls is None else calls,
        memory=memory or {},
        ranges=ranges,
    )


def told(base, other, steps=None):
    sides = [
        Side(label, side if isinstance(side, list) else [side])
        for label, side in zip("AB", (base, other), strict=True)
    ]
    return differences(*sides, steps)


def texts(base, other, steps=None):
    return [each.text for each in told(base, other, steps)]


def test_equal_programs_do_nothing_differently():
    assert told(run(), run()) == []
    assert told([run(), run()], [run(), run()], {"A": [3, 3], "B": [3, 3]}) == []


def test_an_added_prefetch_is_named_first_with_its_count():
    other = run(calls={"cudaFree": 2, "cudaMallocManaged": 3, "cudaMemPrefetchAsync": 5})
    (prefetch, managed, free) = told(run(), other)
    assert prefetch.text == "cudaMemPrefetchAsync: none in A, 5 calls in B"
    assert (prefetch.what, prefetch.base, prefetch.other) == ("call", (0,), (5,))
    assert managed.text == "cudaMallocManaged: 2 calls in A, 3 calls in B"
    assert free.name == "cudaFree"


def test_calls_that_were_not_recorded_are_no_difference():
    silent = Profile("x", run().summary, kernels={"add": 10}, calls=None)
    assert told(run(), silent) == told(silent, run()) == []


def test_kernels_that_only_one_launches_are_named_by_how_often():
    other = run(kernels={"add": 10, "rare": 1, "often": 7})
    assert texts(run(), other) == [
        "Kernel often: none in A, 7 launches in B",
        "Kernel rare: none in A, 1 launch in B",
        "Kernels: 10 launches in A, 18 launches in B",
    ]


def test_where_no_kernel_was_recorded_none_is_missed():
    assert told(run(), run(kernels={})) == []


def test_nvtx_ranges_that_only_one_has_are_named():
    a, b = run(ranges={"fwd": 3, "both": 1}), run(ranges={"bwd": 1_200, "both": 5})
    assert texts(a, b) == [
        "NVTX range bwd: none in A, 1 200 in B",
        "NVTX range fwd: 3 in A, none in B",
    ]
    assert told(a, run(ranges=None)) == told(run(ranges=None), a) == []


def test_what_varies_between_repetitions_is_no_difference():
    base = [run(kernels={"add": n}) for n in (10, 12)]
    within = [run(kernels={"add": n}) for n in (11, 30)]
    beyond = [run(kernels={"add": n}) for n in (13, 30)]
    assert told(base, within) == []
    assert texts(base, beyond) == [
        "Kernels: 10 launches to 12 launches in A, 13 launches to 30 launches in B"
    ]


def test_memory_and_how_full_it_is():
    a = run(
        memory={
            "capacity_bytes": 40 * GIB,
            "available_bytes": 39 * GIB,
            "oversubscription_factor": 0.5,
        }
    )
    b = run(
        memory={
            "capacity_bytes": 40 * GIB,
            "available_bytes": 13 * GIB,
            "oversubscription_factor": 1.5,
        }
    )
    assert texts(a, b) == [
        "GPU memory that is left for managed data: 39.00 GiB in A, 13.00 GiB in B",
        "Oversubscription factor (managed peak / room): 0.5 in A, 1.5 in B",
    ]


@pytest.mark.parametrize("mine", [0, 1])
def test_a_gpu_that_is_full_in_one_condition_only_is_told(mine):
    sides = [run(memory={"evicted_bytes": 0.0})] * 2
    sides[mine] = run(memory={"evicted_bytes": 4096.0, "observed_factor": 1.5})
    (said,) = texts(*sides)
    full, never = ("A", "B") if mine == 0 else ("B", "A")
    assert (
        f"full in {full}, which evicts, managed peak at most 1.5 times what it held; never in {never}"
        in said
    )


def test_where_a_gpu_was_full_the_factor_that_was_to_be_is_not_told_beside_what_was_seen():
    full = {"evicted_bytes": 4096.0, "observed_factor": 6.41, "oversubscription_factor": 0.1}
    spare = {"evicted_bytes": 0.0, "oversubscription_factor": 0.2}
    for sides in ((run(memory=full), run(memory=spare)), (run(memory=spare), run(memory=full))):
        (said,) = texts(*sides)
        assert "6.41 times" in said


def test_that_nothing_is_known_of_evictions_is_not_that_there_are_none():
    assert told(run(memory={"evicted_bytes": 4096.0}), run()) == []


def test_steps_are_compared_where_all_runs_have_some():
    assert texts(run(), run(), {"A": [10], "B": [20]}) == ["Steps: 10 in A, 20 in B"]
    assert told(run(), run(), {"A": [10]}) == []


def test_a_hostile_name_is_harmless():
    (kernel, _) = texts(run(), run(kernels={"add": 10, "\x1b[31m" + "k" * 9_000: 1}))
    assert "\x1b" not in kernel
    assert len(kernel) < 120
