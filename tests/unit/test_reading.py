from __future__ import annotations

import exports as x
import pytest

from nsan.reading import reading


def document(*groups, busy=0, span=None, windows=None, gpus=(0,)):
    """A summary with what a reading looks at: (direction, cause, bytes) per group."""
    rows = [{"direction": d, "cause": c, "bytes": n} for d, c, n in groups]
    return {
        "migrations": {"n": len(rows), "groups": rows, "busy_ns": busy},
        "duration_ns": span,
        "windows_ns": windows,
        "devices": [{"device_id": n, "pid": None, "gpu_id": n} for n in gpus],
    }


def test_without_migrations_there_is_nothing_to_say():
    assert reading(document()) == []
    assert reading({"migrations": {"n": None, "groups": None, "busy_ns": None}}) == []


def test_a_size_that_is_unknown_is_not_guessed():
    assert reading(document(("htod", "coherence", None), ("dtoh", "user", 4096))) == []


def test_faulted_and_prefetched_pages_are_one_sentence_with_the_share():
    got = reading(document(("htod", "coherence", 2 * x.MIB), ("htod", "prefetch", 6 * x.MIB)))
    assert got == [
        "8.00 MiB went to the GPU because it touched absent pages; "
        "the driver's prefetcher brought 75.0% of that."
    ]


def test_groups_of_several_processes_are_added():
    got = reading(document(("htod", "user", 4096), ("htod", "user", 4096)))
    assert got == ["8.00 KiB went to the GPU because the program asked for it."]


@pytest.mark.parametrize(
    ("direction", "cause", "sentence"),
    [
        ("htod", "user", "4.00 KiB went to the GPU because the program asked for it."),
        (
            "htod",
            "access_counters",
            "4.00 KiB went to the GPU because access counters called for it.",
        ),
        (
            "dtoh",
            "eviction",
            "4.00 KiB were evicted to the CPU: GPU memory was full (oversubscribed).",
        ),
        ("dtoh", "coherence", "4.00 KiB went back because the CPU touched it."),
        ("dtoh", "prefetch", "4.00 KiB went back because the CPU touched it."),
        ("dtoh", "user", "4.00 KiB went back because the program asked for it."),
        ("dtod", "coherence", "4.00 KiB moved between GPUs."),
        ("dtod", "user", "4.00 KiB moved between GPUs."),
    ],
)
def test_each_way_and_cause_has_its_sentence(direction, cause, sentence):
    assert reading(document((direction, cause, 4096))) == [sentence]


def test_busy_time_is_a_share_of_the_capture():
    got = reading(document(("dtod", "user", 1), busy=250_000, span=1_000_000))
    assert got[-1] == "Migrations were in flight for 250.000 us, 25.0% of the capture (derived)."


def test_busy_time_of_several_gpus_is_a_share_of_gpu_time():
    got = reading(document(("dtod", "user", 1), busy=500_000, span=1_000_000, gpus=(0, 1)))
    assert got[-1] == (
        "Migrations were in flight for 500.000 us, 25.0% of GPU time in the capture (2 GPUs) (derived)."
    )


@pytest.mark.parametrize(
    "more",
    [
        {"busy": 0, "span": 100},
        {"busy": None, "span": 100},
        {"busy": 10, "span": None},
        {"busy": 10, "span": 0},
        {"busy": 10, "span": 100, "windows": [[0, 50]]},
    ],
)
def test_a_share_that_cannot_be_known_is_not_said(more):
    assert reading(document(("dtod", "user", 4096), **more)) == ["4.00 KiB moved between GPUs."]


def test_the_sample_is_read_as_what_it_is(real):
    import nsan

    got = reading(nsan.summary(real("um_easycuda_rtx4060l_2023.4.4_lazy")))
    assert got[0].startswith("8.00 MiB went to the GPU because it touched absent pages")
    assert got[1] == "4.00 MiB went back because the CPU touched it."
