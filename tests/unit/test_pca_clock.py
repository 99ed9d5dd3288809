"""The clocks of a snapshot and a trace: aligned to a planted mapping, refused for another run."""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pytest

from nsan import schema
from nsan.analysis.pca.clock import Clock, Moments, clock_fits, clock_of
from nsan.analysis.pca.clock_lines import FARTHEST_DRIFT, Line, fitted
from nsan.analysis.pca.tables import CLOCK_FITS
from nsan.errors import NotAlignedError
from nsan.model import machine
from nsan.model.allocator_history import snapshot_frames
from nsan.model.making import oversubscribed
from nsan.model.recording import record
from nsan.model.settings import DEFAULT_SETTINGS
from nsan.model.workloads import NETWORKS
from nsan.model.workloads.training import TrainingRun, trained
from nsan.torch_alloc.tables import SNAPSHOT_TABLES
from nsan.units import MIB

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 5
WALL_2024 = 1_710_000_000_123_456_789


# What was planted --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A wall clock: ``wall = trace * (1 + drift) + offset_ns``."""

    offset_ns: int = WALL_2024
    drift_ppb: int = 0

    def wall_ns(self, trace_ns):
        return trace_ns + trace_ns * self.drift_ppb // 10**9 + self.offset_ns

    def us(self, trace_ns):
        """What a program writes down: whole microseconds."""
        return self.wall_ns(trace_ns) // 1000


def errors_ns(clock, planted, trace_ns):
    """How wrong a mapping is at each moment; a time in whole us is 0.5 us early on average."""
    wall = [planted.wall_ns(int(ns)) - 500 - clock.reference_us * 1000 for ns in trace_ns]
    mapped = [clock.offset_ns + far + far * clock.drift for far in wall]
    return np.abs(np.array(mapped) - np.array(trace_ns, dtype=np.float64))


def frame(columns, table):
    """Make a frame of a table from a dictionary of columns; other columns are null."""
    given = pl.DataFrame(columns)
    return given.select(
        pl.col(name).cast(dtype) if name in columns else pl.lit(None, dtype).alias(name)
        for name, dtype in table.schema.items()
    )


def moments(allocations=(), events=(), **others):
    """Moments of allocations (alloc, free, pid, va, bytes) and of events (us, action, va, bytes)."""
    parts = {
        "allocations": (["alloc_ns", "free_ns", "pid", "va", "bytes"], allocations),
        "allocator_events": (["time_us", "action", "va", "bytes"], events),
        "annotations": (["time_us", "name", "stage"], others.pop("annotations", ())),
        "nvtx_ranges": (["start_ns", "end_ns", "pid", "name"], others.pop("ranges", ())),
        "nvtx_marks": (["start_ns", "pid", "name"], others.pop("marks", ())),
    }
    tables = {**schema.TABLES, **SNAPSHOT_TABLES}
    frames = {
        name: frame(dict(zip(columns, zip(*rows, strict=True), strict=True)), tables[name])
        if rows
        else tables[name].empty().collect()
        for name, (columns, rows) in parts.items()
    }
    return Moments(
        **frames, session_start_utc_ns=others.pop("session_start_utc_ns", None), **others
    )


def used(found):
    fits = clock_fits(found)
    return clock_of(fits), fits


def reason_of(found):
    with pytest.raises(NotAlignedError) as caught:
        clock_of(clock_fits(found))
    return caught.value.reason


# Random histories ---------------------------------------------------------------------------------


@dataclass
class Random:
    """A random history of segments at addresses that come again, and the trace of the same run."""

    rng: random.Random
    n_moments: int = 200
    n_places: int = 12
    span_ns: int = 10 * 60 * 10**9
    planted: Planted = Planted()
    jitter_ns: int = 0

    def __post_init__(self):
        self.times = sorted(self.rng.sample(range(10**6, self.span_ns), self.n_moments))
        free, held, self.lives, self.entries = list(range(self.n_places)), {}, [], []
        for ns in self.times:
            makes = bool(free) and (not held or self.rng.random() < 0.55)
            place = self.rng.choice(free if makes else list(held))
            if makes:
                free.remove(place)
                held[place] = ns
            else:
                free.append(place)
                self.lives.append((held.pop(place), ns, place))
            self.entries.append((ns, "segment_alloc" if makes else "segment_free", place))
        self.lives += [(ns, None, place) for place, ns in held.items()]

    @staticmethod
    def va(place):
        return 0x7F00_0000_0000 + place * 64 * MIB

    @staticmethod
    def size(place):
        return 2 * MIB * (1 + place % 7)

    def events(self):
        late = [self.rng.randint(-self.jitter_ns, self.jitter_ns) for _ in self.entries]
        return [
            (self.planted.us(ns + extra), action, self.va(place), self.size(place))
            for (ns, action, place), extra in zip(self.entries, late, strict=True)
        ]

    def allocations(self, pid=7):
        return [
            (first, last, pid, self.va(place), self.size(place))
            for first, last, place in sorted(self.lives)
        ]


def planted_at_random(rng):
    return Planted(rng.randrange(10**18, 2 * 10**18), rng.randint(-100_000, 100_000))


@pytest.mark.parametrize("seed", range(N))
@pytest.mark.parametrize("span_ns", [5 * 10**7, 10 * 60 * 10**9])
def test_a_planted_offset_and_drift_are_found_to_well_under_a_microsecond(seed, span_ns):
    rng = random.Random(seed)
    run = Random(rng, planted=planted_at_random(rng), span_ns=span_ns)
    clock, _ = used(moments(run.allocations(), run.events(), session_start_utc_ns=0))
    errors = errors_ns(clock, run.planted, run.times)
    # Means of 200 times that were cut to 1 us are off by 20 ns, and their ends by twice that and more.
    assert errors.max() < 60
    assert errors.mean() < 20
    assert (clock.method, clock.pid) == ("segments", 7)


@pytest.mark.parametrize("seed", range(N))
def test_jitter_losses_foreign_memory_and_another_process_do_not_mislead(seed):
    rng = random.Random(seed)
    run = Random(rng, n_moments=900, n_places=40, planted=planted_at_random(rng), jitter_ns=4_000)
    rows = [row for row in run.allocations() if rng.random() > 0.08]
    rows = [(a, None if rng.random() < 0.05 else f, p, v, b) for a, f, p, v, b in rows]
    rows += [
        (ns, ns + 10**8, 7, 0x1000_0000_0000 + i * 64 * MIB, 2 * MIB)
        for i, ns in enumerate(rng.sample(range(run.span_ns), 100))
    ]
    # Another process has the same addresses, as with one process per GPU.
    rows += Random(rng, n_moments=900, n_places=40).allocations(pid=9)
    clock, fits = used(moments(rows, run.events(), session_start_utc_ns=0))
    # 900 moments of +-4 us: the mean is known to 2300 / sqrt(900) = 77 ns, an end to twice that.
    assert errors_ns(clock, run.planted, run.times).max() < 600
    assert clock.pid == 7
    assert fits["n_unmatched"][0] > 0


def test_thousands_of_moments_at_few_addresses_close_together_are_told_apart():
    rng = random.Random(5)
    run = Random(
        rng, n_moments=20_000, n_places=6, span_ns=10**9, planted=Planted(drift_ppb=70_000)
    )
    clock, fits = used(moments(run.allocations(), run.events(), session_start_utc_ns=0))
    assert errors_ns(clock, run.planted, run.times).max() < 30
    assert fits["n_pairs"][0] == 20_000
    assert fits["residual_max_ns"][0] < 600


def test_a_history_from_the_middle_and_a_trace_that_began_late_still_meet():
    rng = random.Random(3)
    run = Random(rng, n_moments=300, planted=Planted(drift_ppb=-90_000))
    first, last = run.times[100], run.times[250]
    rows = [(a, f, p, v, b) for a, f, p, v, b in run.allocations() if a >= first]
    events = [event for event in run.events() if event[0] <= run.planted.us(last)][60:]
    clock, fits = used(moments(rows, events, session_start_utc_ns=0))
    assert errors_ns(clock, run.planted, run.times[100:251]).max() < 300
    assert fits["n_unmatched"][0] <= 12  # releases of memory that was made before the trace


def test_releases_that_are_late_as_a_whole_do_not_move_the_clock():
    rng = random.Random(8)
    run = Random(rng, planted=Planted(drift_ppb=12_345))
    late = [(a, None if f is None else f + 8_000, p, v, b) for a, f, p, v, b in run.allocations()]
    clock, _ = used(moments(late, run.events(), session_start_utc_ns=0))
    assert errors_ns(clock, run.planted, run.times).max() < 250


def test_moments_may_stand_in_any_order_in_the_tables():
    rng = random.Random(4)
    run = Random(rng, planted=Planted(drift_ppb=50_000))
    rows, events = run.allocations(), run.events()
    expected = clock_fits(moments(rows, events))
    rng.shuffle(rows)
    rng.shuffle(events)
    assert clock_fits(moments(rows, events)).equals(expected)


# Few moments --------------------------------------------------------------------------------------


def few(n, *, start, gap_ns=10**9):
    planted = Planted()
    rows = [(10**6 + i * gap_ns, None, 7, (i + 1) << 30, 2 * MIB) for i in range(n)]
    events = [(planted.us(a), "segment_alloc", v, b) for a, _, _, v, b in rows]
    return moments(rows, events, session_start_utc_ns=start)


def test_one_moment_is_believed_where_the_session_start_agrees():
    clock, fits = used(few(1, start=WALL_2024 + 10**6))
    assert clock.drift == 0
    assert abs(clock.offset_ns - 10**6) <= 1000
    assert fits["n_pairs"][0] == 1


@pytest.mark.parametrize("start", [0, None])
def test_one_moment_alone_shows_nothing(start):
    assert "only 1 of its moments of segments" in reason_of(few(1, start=start))


def test_two_moments_at_their_times_are_believed_without_a_drift():
    clock, fits = used(few(2, start=0))
    assert clock.drift == 0
    assert fits["residual_max_ns"][0] <= 500
    assert abs(clock.offset_ns - 10**6) <= 10**9 + 1000


@pytest.mark.parametrize("ppm", [220, -480])
def test_a_clock_that_is_being_slewed_is_followed(ppm):
    run = Random(random.Random(11), planted=Planted(drift_ppb=ppm * 1000), span_ns=10**9)
    clock, _ = used(moments(run.allocations(), run.events(), session_start_utc_ns=0))
    assert errors_ns(clock, run.planted, run.times).max() < 60
    assert clock.drift == pytest.approx(-ppm * 1e-6, abs=1e-6)


@pytest.mark.parametrize("ppm", [700, -600])
def test_a_drift_that_no_clock_has_is_refused_and_named(ppm):
    run = Random(random.Random(11), planted=Planted(drift_ppb=ppm * 1000), span_ns=10**9)
    why = reason_of(moments(run.allocations(), run.events(), session_start_utc_ns=0))
    assert abs(int(re.search(r"drift apart by (\d+) ppm", why)[1]) - abs(ppm)) <= 1
    assert "more than 500 ppm" in why


def test_clock_marks_that_drift_as_no_clock_does_are_refused_too():
    planted = Planted(drift_ppb=800_000)
    times = [10**9 + 10**7 * i for i in range(9)]
    events = [(planted.us(t + 50_000), "alloc", 4096, 512) for t in times]
    assert "its clock marks fit" in reason_of(moments(events=events, marks=marks(planted, times)))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_fit_looks_for_drifts_of_up_to_twice_what_is_believed(sign):
    wall = np.arange(100, dtype=np.int64) * 10**7
    near = fitted(wall, wall + sign * wall * 9 // 10_000, Line(0, 0.0))
    far = fitted(wall, wall + sign * wall * 50 // 10_000, Line(0, 0.0))
    assert near.drift == pytest.approx(sign * 900e-6, abs=1e-6)
    assert far.drift == sign * FARTHEST_DRIFT == sign * 1000e-6


def test_two_moments_that_are_a_second_apart_on_one_side_only_are_refused():
    rows = [(10**6, None, 7, 1 << 30, 2 * MIB), (2 * 10**9, None, 7, 2 << 30, 2 * MIB)]
    events = [(0, "segment_alloc", 1 << 30, 2 * MIB), (10**6, "segment_alloc", 2 << 30, 2 * MIB)]
    assert "of its 2 moments of segments 1 " in reason_of(moments(rows, events))


def test_moments_that_are_all_at_nearly_one_time_give_no_wild_drift():
    run = few(12, start=0, gap_ns=2_000)
    clock, _ = used(run)
    # 22 us of moments tell the drift to some hundreds of ppm at best: it leans to none.
    assert abs(clock.drift) < 60e-6
    assert abs(clock.offset_ns - 10**6) < 25_000


# Other runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(N))
def test_another_run_at_the_same_addresses_is_refused(seed):
    rng = random.Random(seed)
    one, other = (Random(rng, span_ns=10 * 10**9) for _ in range(2))
    found = moments(one.allocations(), other.events(), session_start_utc_ns=WALL_2024)
    assert "moments of segments" in reason_of(found)


@pytest.mark.parametrize("seed", range(N))
def test_shuffled_times_are_refused(seed):
    rng = random.Random(seed)
    run = Random(rng, n_places=60, span_ns=10**9)
    times = [us for us, *_ in run.events()]
    rng.shuffle(times)
    events = [(us, *rest) for us, (_, *rest) in zip(times, run.events(), strict=True)]
    assert "moments of segments" in reason_of(
        moments(run.allocations(), events, session_start_utc_ns=WALL_2024)
    )


@pytest.mark.parametrize("seed", range(N))
@pytest.mark.parametrize(("n_moments", "span_ns"), [(2_000, 4 * 10**8), (8_000, 4 * 10**7)])
def test_moments_so_dense_that_any_offset_meets_some_are_refused(seed, n_moments, span_ns):
    rng = random.Random(seed)
    one = Random(rng, n_moments=n_moments, n_places=3, span_ns=span_ns)
    other = Random(rng, n_moments=400, n_places=3, span_ns=span_ns)
    found = moments(one.allocations(), other.events(), session_start_utc_ns=WALL_2024)
    assert "moments of segments" in reason_of(found)


def test_the_same_run_some_milliseconds_slower_from_the_middle_on_is_refused():
    run = Random(random.Random(6), n_moments=300, span_ns=10**9)
    half = run.times[150]
    rows = [
        tuple(ns + 5_000_000 if ns is not None and ns > half else ns for ns in row[:2]) + row[2:]
        for row in run.allocations()
    ]
    assert "moments of segments" in reason_of(moments(rows, run.events()))


def test_other_memory_at_the_place_of_a_segment_refutes():
    run = few(10, start=WALL_2024)
    rows = run.allocations.to_dicts()
    for row in rows[7:]:  # three of ten segments are larger in this run
        row["bytes"] *= 2
    found = replace(run, allocations=pl.DataFrame(rows, schema=run.allocations.schema))
    assert "of its 10 moments of segments 7 are in the trace at their time" in reason_of(found)


def test_the_session_start_never_replaces_segments_that_refute_it():
    one, other = (Random(random.Random(seed), span_ns=10**9) for seed in (1, 2))
    fits = clock_fits(moments(one.allocations(), other.events(), session_start_utc_ns=WALL_2024))
    assert fits["method"].to_list() == ["segments", "session_start"]
    assert not fits["is_used"].any()


def test_no_segment_in_common_is_another_run_too():
    run = few(5, start=WALL_2024)
    moved = run.allocations.with_columns(pl.col("va") + (1 << 40))
    assert "of its 5 moments of segments 0 " in reason_of(replace(run, allocations=moved))


# The host -----------------------------------------------------------------------------------------


def with_host(n_steps=6, *, wait_ns=20_000_000, wall=lambda ns: ns):
    """Segments in the first ms only; then steps of 40 calls with an entry before each, and a wait."""
    planted = Planted(drift_ppb=30_000)
    rows = [(i * 50_000 + 999, None, 7, (i + 1) << 30, 2 * MIB) for i in range(8)]
    events = [(planted.us(a), "segment_alloc", v, b) for a, _, _, v, b in rows]
    calls, ns, entries = [], 1_000_000, []
    for _ in range(n_steps):
        for _ in range(40):
            entries.append(ns + 100)
            calls.append((ns + 2_000, ns + 8_000))
            ns += 9_100
        calls.append((ns, ns + wait_ns))
        ns += wait_ns + 3_000
    events += [(planted.us(wall(t)), "alloc", 1 << 30, 512) for t in entries]
    api = pl.DataFrame(calls, schema={"start_ns": pl.Int64, "end_ns": pl.Int64}, orient="row")
    api = api.with_columns(pid=pl.lit(7, pl.UInt32), tid=pl.lit(7, pl.UInt32))
    return moments(rows, events, api_calls=api), planted, entries


def test_entries_between_calls_tell_the_drift_long_after_the_last_segment():
    found, planted, entries = with_host(n_steps=60)
    alone, _ = used(replace(found, api_calls=None))
    clock, _ = used(found)
    # 1.2 s of entries, 0.4 ms of segments: a drift from these is good for nothing.
    assert errors_ns(alone, planted, entries).max() > 5_000
    assert errors_ns(clock, planted, entries).max() < 2_500  # entries have 3.1 us between the calls


def test_a_history_that_allocates_while_the_host_waits_is_of_another_run():
    found, *_ = with_host(wall=lambda ns: ns if ns < 10_000_000 else ns + 7_000_000)
    assert "does not agree with the trace" in reason_of(found)
    # Nothing but the waits tells.
    assert used(replace(found, api_calls=None))[0].method == "segments"


def test_a_history_that_goes_on_after_the_trace_while_calls_have_no_entries_is_of_another_run():
    found, *_ = with_host(2, wall=lambda ns: ns if ns < 10_000_000 else ns + 60_000_000)
    assert "does not agree with the trace" in reason_of(found)


def test_a_thread_that_allocates_while_another_waits_does_not_refute():
    found, *_ = with_host(wall=lambda ns: ns if ns < 10_000_000 else ns + 7_000_000)
    calls = found.api_calls
    second = calls.with_columns(
        pl.col("start_ns", "end_ns") + 7_000_000, tid=pl.lit(8, pl.UInt32)
    ).filter(pl.col("end_ns") - pl.col("start_ns") < 10**6)
    clock, _ = used(replace(found, api_calls=pl.concat([calls, second])))
    assert clock.method == "segments"


# Other methods ------------------------------------------------------------------------------------


def ranges(n=20, *, planted=None, late=0):
    planted = planted or Planted(drift_ppb=-44_000)
    rng = random.Random(2)
    spans, ns = [], 10**6
    for _ in range(n):
        spans.append((ns, ns + rng.randrange(10**6, 10**8)))
        ns = spans[-1][1] + rng.randrange(10**5, 10**6)
    nvtx = [(a, b, 7, f"step, seq = {i}") for i, (a, b) in enumerate(spans)]
    stages = [(ns, stage) for a, b in spans for ns, stage in ((a, "START"), (b, "END"))]
    notes = [(planted.us(t + i * late), "step", stage) for i, (t, stage) in enumerate(stages)]
    return nvtx, notes, planted, [t for span in spans for t in span]


def test_ranges_of_the_same_names_align_where_no_segment_is_known():
    nvtx, notes, planted, times = ranges()
    clock, fits = used(moments(ranges=nvtx, annotations=notes, session_start_utc_ns=0))
    assert clock.method == "annotations"
    assert errors_ns(clock, planted, times).max() < 400
    assert fits["n_pairs"][0] == 40


def test_ranges_that_do_not_meet_refute():
    nvtx, notes, *_ = ranges(late=3_000_000)
    found = moments(ranges=nvtx, annotations=notes, session_start_utc_ns=WALL_2024)
    assert "starts and ends of ranges" in reason_of(found)


def test_ranges_show_the_same_run_where_the_trace_knows_the_memory_under_other_addresses():
    nvtx, notes, planted, times = ranges()
    arena = [(0, None, 7, 1 << 40, 1 << 36)]
    events = [(planted.us(times[4]), "segment_alloc", (1 << 40) + (1 << 30), 2 * MIB)]
    clock, fits = used(moments(arena, events, ranges=nvtx, annotations=notes))
    assert clock.method == "annotations"
    assert fits.filter(method="segments").row(0)[1:4] == (False, 0, 1)


def marks(planted, times, pid=7):
    return [(ns, pid, f"nsan clock {planted.us(ns)}") for ns in times]


@pytest.mark.parametrize("n", [1, 2, 9])
def test_marks_that_say_the_wall_time_align(n):
    planted = Planted(drift_ppb=60_000 if n == 9 else 0)
    times = [10**9 * (i + 1) + 123 * i for i in range(n)]
    events = [(planted.us(t + 50_000), "alloc", 4096, 512) for t in times]
    other = (5, 7, "nsan clock soon")
    clock, fits = used(moments(events=events, marks=[*marks(planted, times), other]))
    assert (clock.method, clock.pid, fits["n_pairs"][0]) == ("mark", 7, n)
    assert errors_ns(clock, planted, times).max() <= (500 if n < 3 else 400)


def test_marks_of_another_time_than_the_history_refute():
    planted = Planted()
    events = [(planted.us(10**9) + 3_600 * 10**6, "alloc", 4096, 512)]
    assert "another time" in reason_of(moments(events=events, marks=marks(planted, [10**9])))


def test_the_session_start_is_used_where_nothing_can_be_compared():
    nvtx = [(0, 10**9, 7, "step")]
    events = [(WALL_2024 // 1000 + 5, "alloc", 4096, 512)]
    clock, fits = used(moments(events=events, ranges=nvtx, session_start_utc_ns=WALL_2024))
    row = fits.row(0, named=True)
    assert (clock.method, row["n_pairs"], row["n_unmatched"]) == ("session_start", 0, None)
    assert (clock.drift, clock.residual_max_ns, clock.pid) == (0, None, None)
    # The time of the event: 5 us and on average a half after the session start's whole us.
    mapped = pl.DataFrame({"time_us": [events[0][0], None]}).select(clock.ns())
    assert mapped.to_series().to_list() == [5 * 1000 - WALL_2024 % 1000 + 500, None]


def test_the_session_start_of_another_time_refutes():
    nvtx = [(0, 10**9, 7, "step")]
    events = [(WALL_2024 // 1000 + 3_600 * 10**6, "alloc", 4096, 512)]
    found = moments(events=events, ranges=nvtx, session_start_utc_ns=WALL_2024)
    assert "session start" in reason_of(found)


def test_the_session_start_says_what_it_leaves_over():
    found = replace(few(6, start=None), session_start_utc_ns=WALL_2024 + 7_000_000)
    _, fits = used(found)
    row = fits.row(1, named=True)
    assert (row["method"], row["n_pairs"], row["is_used"]) == ("session_start", 6, False)
    assert row["residual_max_ns"] == pytest.approx(7_000_000, abs=1000)


def test_a_snapshot_without_times_cannot_be_aligned():
    run = few(6, start=WALL_2024)
    events = run.allocator_events.with_columns(time_us=pl.lit(None, pl.Int64))
    found = replace(run, allocator_events=events)
    assert clock_fits(found).equals(CLOCK_FITS.empty().collect())
    assert reason_of(found) == NotAlignedError.NO_TIMES
    with pytest.raises(
        NotAlignedError, match=r"^Not aligned: .* no times .*PyTorch 2\.2 or later\.$"
    ):
        clock_of(clock_fits(found))


def test_a_clock_maps_whole_columns_exactly():
    clock = Clock("segments", 1_000, 1_700_000_000_000_000, 100e-6, 7, 0.0)
    times = pl.DataFrame({"time_us": [1_700_000_000_000_000, 1_700_000_600_000_000, None]})
    # 600 s at 100 ppm are 60 ms more.
    assert times.select(clock.ns()).to_series().to_list() == [1_000, 600_060_001_000, None]


# Modelled runs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A modelled run: the tables of the trace, those of the snapshot, and when each entry was made."""

    trace: dict[str, pl.DataFrame]
    snapshot: dict[str, pl.DataFrame]
    entry_ns: list[int]

    def moments(self, snapshot=None, planted=None):
        """What is compared, with the snapshot of this run or of another."""
        other = snapshot or self
        events = other.snapshot["allocator_events"]
        if planted is not None:
            events = events.with_columns(
                time_us=pl.Series([planted.us(ns) for ns in other.entry_ns])
            )
        names = ("allocations", "nvtx_ranges", "nvtx_marks", "api_calls")
        return Moments(
            **{name: self.trace[name] for name in names},
            allocator_events=events,
            annotations=SNAPSHOT_TABLES["annotations"].empty().collect(),
            session_start_utc_ns=0,
        )


def modelled(allocator, factor, *, network="alexnet", batch=2):
    size = {"image": 64} if network == "alexnet" else {"sequence": 16}
    how = TrainingRun(batch=batch, allocator=allocator, **size)
    made = trained(NETWORKS[network], how, DEFAULT_SETTINGS.gpu_profile)
    settings = oversubscribed(DEFAULT_SETTINGS, made.peak_tensor_bytes, factor)
    happened = machine.run(made.program, settings)
    done = [0, *happened.operation_ns]
    return Run(
        record(happened, settings, "model"),
        snapshot_frames(made.history, happened.operation_ns),
        [done[entry.after] for entry in made.history.entries],
    )


@pytest.fixture(scope="module")
def runs():
    return {
        (allocator, factor): modelled(allocator, factor)
        for allocator in ("caching", "raw")
        for factor in (1.0, 1.5)
    }


@pytest.mark.parametrize("allocator", ["caching", "raw"])
@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("seed", range(N))
def test_a_modelled_run_is_aligned_to_what_was_planted_at_every_entry(
    runs, allocator, factor, seed
):
    run = runs[allocator, factor]
    planted = planted_at_random(random.Random(seed))
    clock, fits = used(run.moments(planted=planted))
    errors = errors_ns(clock, planted, run.entry_ns)
    assert errors.max() < 1_000
    assert errors.mean() < 500
    assert fits["n_unmatched"][0] == 0
    assert fits["residual_max_ns"][0] < 1_000


@pytest.mark.parametrize("planted", [None, Planted(drift_ppb=77_000)])
@pytest.mark.parametrize("allocator", ["caching", "raw"])
@pytest.mark.parametrize(("factor", "other"), [(1.0, 1.5), (1.5, 1.0)])
def test_the_same_program_at_another_factor_is_refused(runs, planted, allocator, factor, other):
    found = runs[allocator, factor].moments(runs[allocator, other], planted)
    assert reason_of(found)


@pytest.fixture(scope="module")
def others(runs):
    """Runs that are not the one of alexnet with a batch of two under the caching allocator."""
    return [
        modelled("caching", 1.5, batch=4),
        modelled("caching", 1.5, network="gpt2-small"),
        runs["raw", 1.5],
    ]


@pytest.mark.parametrize("planted", [None, Planted(drift_ppb=-77_000)])
def test_another_batch_another_network_and_another_allocator_are_refused(runs, others, planted):
    run = runs["caching", 1.5]
    for other in others:
        assert reason_of(run.moments(other, planted))
        assert reason_of(other.moments(run, planted))
