"""Fault rows that are written in other ways: told apart, put together, or refused by name.

The same modelled run is recorded in each style; whose copy is whose is known from the run itself.
"""

from __future__ import annotations

import os
from functools import cache

import polars as pl
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from polars.testing import assert_frame_equal
from programs import programs, run_to_end

from nsan.analysis.driver.batches import batches, with_batch_id
from nsan.analysis.driver.fault_rows import FAULT_ROW_CHECKS, USABLE_STYLES, fault_row_checks
from nsan.model.machine import run
from nsan.model.recording import PLAIN, QUEUE_ROWS, Style, record
from nsan.model.samples import SAMPLES
from nsan.model.truth import TRUTH_TABLES
from nsan.schema import GPU_FAULTS, MIGRATIONS

SOAK = os.environ.get("NSAN_SOAK") == "1"
N = 40 if SOAK else 6

FAULTING = [name for name in SAMPLES if name != "user_prefetch"]
MOVING = [name for name in FAULTING if name != "first_touch"]
US = 1_000
A = 1 << 40


@cache
def ran(name):
    recipe = SAMPLES[name].recipe()
    return run(recipe.program, recipe.settings), recipe.settings


def seen(tables):
    """The checks, the batches, and the batch of each copy, of a recording."""
    given_tables = tables["gpu_faults"].lazy(), tables["migrations"].lazy()
    return (
        fault_row_checks(*given_tables).collect(),
        batches(*given_tables).collect(),
        with_batch_id(*given_tables).collect(),
    )


def truth(happened, machine):
    """The copies that the run made, each with start and end of its true batch."""
    plain = record(happened, machine, "plain")
    true = TRUTH_TABLES["copy_batches"].build(happened, machine, plain)
    real = TRUTH_TABLES["batches"].build(happened, machine, plain)
    numbers = plain["migrations"].with_columns(batch=true["batch"].cast(pl.Int64))
    assert (numbers["va"] == true["va"]).all()
    return numbers.select("start_ns", "device_id", "va", "direction", "batch").join(
        real.select(pl.col("batch").cast(pl.Int64), raised="raised_ns", true_end="end_ns"),
        on="batch",
        how="left",
    ), real


@cache
def truth_of(name):
    return truth(*ran(name))


@cache
def seen_plain(name):
    return seen(record(*ran(name), name))


def judged(tables, true, real):
    """Each copy with its batch and its true one; the checks, the batches and the true batches."""
    checks, got, copies = seen(tables)
    ends = got.select("batch_id", "kind", got_start="start_ns", got_end="end_ns")
    joined = (
        copies.select("start_ns", "device_id", "va", "direction", "bytes", "batch_id")
        .join(true, on=["start_ns", "device_id", "va", "direction"], how="left", validate="1:1")
        .join(ends, on="batch_id", how="left")
    )
    assert joined.height == tables["migrations"].height
    return checks, got, joined, real


# Rows of pages and of blocks. ---------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["page", "block"])
@pytest.mark.parametrize("name", FAULTING)
def test_rows_of_pages_or_blocks_are_put_together_by_their_end(name, rows):
    happened, machine = ran(name)
    tables = record(happened, machine, name, Style(rows=rows))
    checks, got, copies, real = judged(tables, *truth_of(name))
    assert set(checks["style"]) <= {*USABLE_STYLES}
    assert copies.filter(pl.col("got_end").ne_missing(pl.col("true_end"))).is_empty()
    assert set(got["kind"]) == {"derived"}
    assert sorted(got.select("device_id", "end_ns").rows()) == sorted(
        real.select("device_id", "end_ns").rows()
    )
    # What it is called: only where some batch has two rows can it be told.
    several = tables["gpu_faults"].select("device_id", "end_ns").is_duplicated().any()
    if several and name in MOVING:
        assert set(checks["style"]) == {"page" if rows == "page" else "va_block"}


@pytest.mark.parametrize("rows", ["page", "block"])
@pytest.mark.parametrize("name", MOVING)
def test_rows_of_pages_or_blocks_give_the_copies_of_plain_rows(name, rows):
    happened, machine = ran(name)
    _, plain, _ = seen_plain(name)
    _, got, _ = seen(record(happened, machine, name, Style(rows=rows)))
    figures = ["device_id", "start_ns", "end_ns", "va", "bytes", "n_pushes", "outcome", "kind"]
    assert_frame_equal(got.select(figures), plain.select(figures))


def test_a_batch_of_page_rows_by_hand():
    rows = [
        (100, 5_000, 0),
        (100, 5_000, 8),
        (100, 5_000, 513),
        (4_000, 9_000, 1),
        (4_000, 9_000, 2),
    ]
    tables = by_hand(rows, [(2_000, 2_500, 0), (2_600, 2_900, 8), (3_000, 3_900, 513)])
    checks, got, _ = seen(tables)
    # Page 1 and page 2 of the second batch never came.
    assert checks.select("style", "n_rows", "n_ends").rows() == [("page", 5, 2)]
    assert got.select("start_ns", "end_ns", "va", "n_page_faults", "outcome").rows() == [
        (100, 5_000, A, 1, "data"),
        (4_000, 9_000, A + 4096, 1, "first_touch"),
    ]


def test_a_batch_of_block_rows_by_hand():
    rows = [(100, 5_000, 8), (100, 5_000, 512), (4_000, 9_000, 1)]
    tables = by_hand(rows, [(2_000, 2_500, 8), (3_000, 3_900, 512), (6_000, 6_500, 1)])
    checks, got, copies = seen(tables)
    assert checks.select("style", "n_rows", "n_ends").rows() == [("va_block", 3, 2)]
    assert got["va"].to_list() == [A + 8 * 4096, A + 4096]
    assert copies["batch_id"].to_list() == [0, 0, 1]


def by_hand(rows, copies):
    faults = [
        {
            "start_ns": start,
            "end_ns": end,
            "pid": 1,
            "device_id": 0,
            "va": A + 4096 * page,
            "n_page_faults": 1,
        }
        for start, end, page in rows
    ]
    moved = [
        {
            "start_ns": start,
            "end_ns": end,
            "pid": 1,
            "device_id": 0,
            "va": A + 4096 * page,
            "bytes": 4096,
            "direction": "htod",
            "cause": "coherence",
            "cause_id": 2,
        }
        for start, end, page in copies
    ]
    return {
        "gpu_faults": pl.DataFrame(faults, schema=GPU_FAULTS.schema),
        "migrations": pl.DataFrame(moved, schema=MIGRATIONS.schema),
    }


# Ends that scatter. -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAULTING)
def test_ends_that_are_late_by_5_us_do_no_harm(name):
    happened, machine = ran(name)
    tables = record(happened, machine, name, Style(jitter_ns=5 * US))
    checks, got, copies, real = judged(tables, *truth_of(name))
    assert set(checks["style"]) <= {"batch", "no_copies"}
    assert set(got["kind"]) == {"derived"}
    assert got.height == real.height
    assert copies.filter(pl.col("got_start").ne_missing(pl.col("raised"))).is_empty()


JITTERED = [
    Style(rows=rows, jitter_ns=jitter)
    for rows in ("batch", "page", "block")
    for jitter in (5 * US, 50 * US, 500 * US)
]


def told(checks, got, copies, real):
    """Count copies whose batch is said to be derived, those of another batch, and extra batches."""
    derived = copies.filter(pl.col("kind") == "derived")
    wrong = derived.filter(pl.col("got_start").ne_missing(pl.col("raised")))
    n_derived = got.filter(pl.col("kind") == "derived").height
    unusable = checks.filter(~pl.col("style").is_in(USABLE_STYLES))
    if unusable.height:
        # A GPU whose rows are refused has no batch that is said to be exact.
        refused = got.join(unusable, on=["pid", "device_id"], how="semi")
        assert set(refused["kind"]) <= {"reconstructed"}
        assert set(unusable["style"]) <= {"jittered", "jittered_page", "other"}
    return derived.height, wrong.height, max(n_derived - real.height, 0)


@pytest.mark.parametrize("style", JITTERED, ids=lambda style: f"{style.rows}-{style.jitter_ns}")
@pytest.mark.parametrize("name", MOVING)
def test_scattered_ends_are_refused_by_name_or_harmless(name, style):
    happened, machine = ran(name)
    tables = record(happened, machine, name, style)
    checks, got, copies, real = judged(tables, *truth_of(name))
    derived, wrong, extra = told(checks, got, copies, real)
    assert wrong <= 0.01 * derived
    assert extra <= 0.02 * real.height


@pytest.mark.parametrize("jitter", [5 * US, 50 * US, 500 * US])
@pytest.mark.parametrize("name", ["stream", "random", "advice", "two_gpus"])
def test_scattered_rows_of_pages_are_recognised(name, jitter):
    happened, machine = ran(name)
    for rows in ("page", "block"):
        style = Style(rows=rows, jitter_ns=jitter)
        checks, got, _ = seen(record(happened, machine, name, style))
        assert set(checks["style"]) == {"jittered_page"}
        assert set(got["kind"]) == {"reconstructed"}


@pytest.mark.parametrize("name", ["stream", "ping_pong", "oversubscribed_sweep", "two_gpus"])
def test_ends_that_are_late_by_half_a_ms_are_refused(name):
    happened, machine = ran(name)
    checks, got, _ = seen(record(happened, machine, name, Style(jitter_ns=500 * US)))
    assert not set(checks["style"]) & set(USABLE_STYLES)
    assert set(got["kind"]) == {"reconstructed"}


def test_what_is_refused_is_what_the_copies_alone_say():
    happened, machine = ran("stream")
    tables = record(happened, machine, "stream", Style(rows="page", jitter_ns=500 * US))
    _, got, _ = seen(tables)
    _, alone, _ = seen(tables | {"gpu_faults": tables["gpu_faults"].clear()})
    assert_frame_equal(got, alone)


def test_random_programs_in_any_style_are_never_wrong_in_silence():
    # Below 20 copies a spread of ends says nothing: not judged. All programs together.
    totals = {}
    styles = [PLAIN, Style(rows="page"), Style(rows="block"), *JITTERED]

    @seed(5)
    @settings(
        max_examples=N,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def judge(drawn):
        program, machine = drawn
        happened = run_to_end(program, machine).happened
        if record(happened, machine, "x")["migrations"].height < 20:
            return
        true = truth(happened, machine)
        for style in styles if SOAK else styles[::2]:
            tables = record(happened, machine, "x", style)
            derived, wrong, extra = told(*judged(tables, *true))
            before = totals.get(style, (0, 0, 0))
            n_true = happened.log["batches"].height
            if not style.jitter_ns:
                assert (wrong, extra) == (0, 0)
            assert extra <= 0.02 * n_true + 1
            totals[style] = (before[0] + derived, before[1] + wrong, before[2] + extra)

    judge()
    assert totals
    assert sum(derived for derived, *_ in totals.values()) > 0
    for derived, wrong, _ in totals.values():
        assert wrong <= max(0.01 * derived, 1)


def late(lags, odd=()):
    """Batches of one page and copy, whose ends are late; and copies that fit no row."""
    rows = [(200_000 * i, 200_000 * i + 3_000 + lag, i) for i, lag in enumerate(lags)]
    copies = [(200_000 * i + 2_000, 200_000 * i + 3_000, i) for i in range(len(lags))]
    return by_hand(rows, [*copies, *odd])


def test_ends_that_follow_the_copies_at_all_distances_are_refused_where_something_is_odd():
    # One of 31 copies fits no row: too few to refuse, but the ends wander by 90 us.
    wandering = [2_400 + 30_000 * (i % 4) for i in range(30)]
    odd = [(7_000_000, 7_001_000, 900)]
    styles = {
        "wanders": late(wandering, odd),
        "steady": late([2_400] * 30, odd),
        "nothing is odd": late(wandering),
        "too few": late(wandering[:7], odd[:0]),
    }
    found = {name: seen(tables)[0]["style"].item() for name, tables in styles.items()}
    assert found == {
        "wanders": "jittered",
        "steady": "batch",
        "nothing is odd": "batch",
        "too few": "batch",
    }


@pytest.mark.parametrize(("n_shared", "style"), [(2, "no_copies"), (12, "jittered_page")])
def test_rows_that_share_their_start_but_not_their_end_are_pages_of_scattered_ends(n_shared, style):
    # 20 batches; of some a second page is written, with an end of its own. Nothing is copied.
    rows = [(10_000 * i, 10_000 * i + 5_000, 2 * i) for i in range(20)]
    rows += [(10_000 * i, 10_000 * i + 7_000, 2 * i + 1) for i in range(n_shared)]
    checks, got, _ = seen(by_hand(rows, []))
    assert checks["style"].to_list() == [style]
    assert got.height == (0 if style == "jittered_page" else 22)


# Rows that were lost, and clocks that differ. ------------------------------------------------------


@pytest.mark.parametrize("lost_us", [100, 1_000, 10_000])
def test_what_a_hole_leaves_is_right(lost_us):
    name = "oversubscribed_sweep"
    happened, machine = ran(name)
    tables = record(happened, machine, name, Style(lost_ns=lost_us * US))
    plain = record(happened, machine, name)
    n_lost = plain["migrations"].height - tables["migrations"].height
    assert plain["migrations"].height > QUEUE_ROWS - plain["gpu_faults"].height
    assert n_lost > 0
    checks, got, copies, real = judged(tables, *truth_of(name))
    assert checks["style"].to_list() == ["batch"]
    derived = copies.filter(pl.col("kind") == "derived")
    assert derived.filter(pl.col("got_end").ne_missing(pl.col("true_end"))).is_empty()
    # Every row that is left is a batch, and has no more than its true bytes.
    exact = got.filter(pl.col("kind") == "derived")
    assert set(exact["end_ns"]) == set(tables["gpu_faults"]["end_ns"])
    into = pl.col("direction") != "dtoh"
    _, whole, _ = seen_plain(name)
    most = exact.join(whole, on=["device_id", "end_ns"], validate="1:1", suffix="_whole")
    assert most.height == exact.height
    assert (most["bytes"] <= most["bytes_whole"]).all()
    # Copies whose row is lost are not given to a neighbour, and none of their bytes is dropped.
    orphans = copies.join(exact.select(true_end="end_ns"), on="true_end", how="anti").filter(
        into, pl.col("batch").is_not_null()
    )
    assert set(orphans["kind"]) <= {"reconstructed"}
    assert got["bytes"].sum() == copies.filter(into, pl.col("batch").is_not_null())["bytes"].sum()
    assert exact.height == tables["gpu_faults"].height < real.height + (lost_us == 100)


def test_a_hole_that_takes_a_row_makes_a_reconstructed_batch_of_its_copies():
    # In a hole of 1 ms five rows of the sample are lost; copies of one of these batches are left.
    name = "oversubscribed_sweep"
    tables = record(*ran(name), name, Style(lost_ns=1_000 * US))
    _, got, copies, _ = judged(tables, *truth_of(name))
    left = set(tables["gpu_faults"]["end_ns"])
    orphans = copies.filter(
        pl.col("batch").is_not_null(),
        ~pl.col("true_end").is_in(list(left)),
        pl.col("direction") == "htod",
    )
    assert orphans.height > 0
    assert got.filter(pl.col("kind") == "reconstructed")["bytes"].sum() == orphans["bytes"].sum()


@pytest.mark.parametrize(
    "style", [Style(skew_ns=-3_000_000), Style(skew_ns=70_000, drift_ppm=50.0)]
)
@pytest.mark.parametrize("name", ["stream", "ping_pong"])
def test_a_clock_of_the_cpu_that_is_ahead_changes_nothing(name, style):
    # Faults and copies carry the time of the GPU.
    happened, machine = ran(name)
    for got, plain in zip(
        seen(record(happened, machine, name, style)),
        seen_plain(name),
        strict=True,
    ):
        assert_frame_equal(got, plain)


# The checks themselves. ---------------------------------------------------------------------------


def test_the_checks_of_plain_rows_find_nothing_odd():
    for name in MOVING:
        checks, *_ = seen_plain(name)
        assert checks.schema == FAULT_ROW_CHECKS.schema
        assert set(checks["style"]) == {"batch"}
        for column in ("n_out_of_order", "n_counts_outside", "n_copies_outside", "n_rows_above"):
            assert set(checks[column]) == {0}
        assert (checks["n_rows"] == checks["n_ends"]).all()


def test_the_checks_count_by_hand():
    rows = [(0, 5_000, 0), (4_000, 9_000, 40), (8_000, 8_500, 50)]
    copies = [
        (1_000, 1_500, 0),
        (2_000, 2_500, 7),
        (2_600, 2_700, 3),  # below the one before
        (5_500, 5_700, 30),  # below the page of its row
        (9_500, 9_600, 60),  # after the last row
    ]
    tables = by_hand(rows, copies)
    checks, *_ = seen(tables | {"gpu_faults": counted(tables["gpu_faults"], [1, 257, 0])})
    row = checks.row(0, named=True)
    assert row["n_rows"] == row["n_ends"] == 3
    assert row["n_out_of_order"] == 1  # 8500 before 9000
    assert row["n_counts_outside"] == 2  # 257 and 0
    assert row["n_copies"] == 5
    assert row["n_descending"] == 1
    # 9500 is after all rows; the first end after 5500 is of a fault raised at 8000.
    assert row["n_copies_outside"] == 2
    assert row["style"] == "other"


def counted(rows, counts):
    return rows.with_columns(n_page_faults=pl.Series(counts, dtype=pl.Int64))


def test_a_capture_without_rows_has_no_checks():
    got = fault_row_checks(GPU_FAULTS.empty(), MIGRATIONS.empty()).collect()
    assert got.is_empty()
    assert got.schema == FAULT_ROW_CHECKS.schema


def test_each_process_and_gpu_is_judged_by_itself():
    happened, machine = ran("stream")
    plain = record(happened, machine, "x")
    pages = record(happened, machine, "x", Style(rows="page"))
    bad = record(happened, machine, "x", Style(rows="page", jitter_ns=500 * US))
    parts = {(1, 0): plain, (1, 1): pages, (2, 0): bad}

    def of(name):
        return pl.concat(
            tables[name].with_columns(
                pid=pl.lit(pid, pl.UInt32), device_id=pl.lit(device, pl.Int64)
            )
            for (pid, device), tables in parts.items()
        )

    checks, got, _ = seen({"gpu_faults": of("gpu_faults"), "migrations": of("migrations")})
    assert checks.select("pid", "device_id", "style").rows() == [
        (1, 0, "batch"),
        (1, 1, "page"),
        (2, 0, "jittered_page"),
    ]
    for (pid, device), tables in parts.items():
        _, alone, _ = seen(tables)
        mine = got.filter(pl.col("pid") == pid, pl.col("device_id") == device)
        assert_frame_equal(
            mine.drop("pid", "device_id", "batch_id"), alone.drop("pid", "device_id", "batch_id")
        )
