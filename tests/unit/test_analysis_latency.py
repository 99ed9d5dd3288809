from __future__ import annotations

import os
from functools import cache

import hypothesis
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from scipy import stats

import nsan
from nsan.analysis.driver.latency import (
    TERMS,
    batch_gaps,
    batch_latency,
    latency_histogram,
    service_fit,
)
from nsan.model.profiles import HOSTS
from nsan.schema import GPU_FAULTS, MIGRATIONS
from nsan.uvm.constants import PAGE_BYTES, VA_BLOCK_BYTES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 15

A = 0x7F00_0000_0000
ALL = [batch_latency, latency_histogram, batch_gaps, service_fit]


def row(start, end, *, va=A, pid=1, device=0, **more):
    keys = {"pid": pid, "device_id": device, "va": va, "n_page_faults": 1, "access": "read"}
    return {"start_ns": start, "end_ns": end} | keys | more


def copy(start, end, *, va=A, size=PAGE_BYTES, cause=2, way="htod", pid=1, device=0):
    return {
        "start_ns": start,
        "end_ns": end,
        "pid": pid,
        "device_id": device,
        "va": va,
        "bytes": size,
        "direction": way,
        "cause_id": cause,
    }


def run(analysis, rows=(), copies=(), **options):
    faults = pl.LazyFrame([*rows], schema=GPU_FAULTS.schema)
    return analysis(faults, pl.LazyFrame([*copies], schema=MIGRATIONS.schema), **options).collect()


def fetched(rows, *, first=0):
    """A page copied within each row, so that it moved data."""
    return [
        copy(r["end_ns"] - 8, r["end_ns"] - 5, va=r["va"], pid=r["pid"], device=r["device_id"])
        for r in rows[first:]
    ]


def apart(*times, **more):
    """Rows on pages of their own."""
    return [row(*time, va=A + i * PAGE_BYTES, **more) for i, time in enumerate(times)]


# Latency and service ---------------------------------------------------------------------------


def test_service_begins_when_the_batch_before_is_done():
    rows = apart((0, 100), (50, 180), (200, 260))
    [got] = run(batch_latency, rows, fetched(rows)).to_dicts()
    assert (got["outcome"], got["n_batches"]) == ("data", 3)
    assert (got["latency_sum_ns"], got["latency_max_ns"], got["latency_p50_ns"]) == (290, 130, 100)
    assert (got["service_sum_ns"], got["service_max_ns"], got["service_p50_ns"]) == (240, 100, 80)
    assert got["time_step_ns"] is None


def test_gpus_and_processes_do_not_wait_for_each_other():
    rows = [
        row(0, 100),
        row(50, 180, device=1),
        row(60, 190, pid=2),
        row(70, 200, pid=None, device=None),
    ]
    got = run(batch_latency, rows, fetched(rows)[:3])
    assert got.select("pid", "device_id", "service_sum_ns").rows() == [
        (None, None, 130),
        (1, 0, 100),
        (1, 1, 130),
        (2, 0, 130),
    ]


def test_outcomes_are_kept_apart():
    rows = apart((0, 100), (100, 150), (150, 170))
    got = run(batch_latency, rows, fetched(rows)[:2])
    assert got.select("outcome", "n_batches", "latency_sum_ns").rows() == [
        ("data", 2, 150),
        ("first_touch", 1, 20),
    ]


def test_percentiles_are_those_of_numpy():
    times = [3 * i * i % 997 + 20 for i in range(60)]
    rows = apart(*((1000 * i, 1000 * i + time) for i, time in enumerate(times)))
    [got] = run(batch_latency, rows, fetched(rows)).to_dicts()
    for share in (10, 50, 90, 99):
        expected = np.percentile(times, share)
        assert got[f"latency_p{share}_ns"] == pytest.approx(expected)
        assert got[f"service_p{share}_ns"] == pytest.approx(expected)


def test_coarse_starts_say_how_far_off_service_may_be():
    rows = [
        r | {"sequence": i} for i, r in enumerate(apart((1000, 1600), (1300, 1650), (1700, 1720)))
    ]
    got = run(batch_latency, rows, fetched(rows))
    assert got["time_step_ns"].unique().to_list() == [100]
    assert got["latency_sum_ns"].sum() == 600 + 350 + 20


def test_without_fault_rows_there_is_no_latency():
    copies = [copy(0, 10), copy(50, 60, va=A + PAGE_BYTES)]
    assert run(batch_latency, (), copies).is_empty()
    assert run(latency_histogram, (), copies).is_empty()
    assert run(service_fit, (), copies).is_empty()


# Histogram -------------------------------------------------------------------------------------


def test_classes_are_powers_of_two():
    rows = apart((0, 64), (100, 227), (300, 428), (420, 548))
    got = run(latency_histogram, rows, fetched(rows))
    # latencies 64, 127, 128, 128; the last one waits for the one before until 428
    columns = ("min_ns", "n_by_latency", "latency_ns", "n_by_service", "service_ns")
    assert got.select(columns).rows() == [(64, 2, 191, 3, 311), (128, 2, 256, 1, 128)]


times = st.lists(st.tuples(st.integers(0, 5000), st.integers(20, 400)), max_size=12)


@given(times)
@hypothesis.settings(max_examples=N, deadline=None)
def test_classes_add_up_to_the_totals(parts):
    ends = np.cumsum([gap + 30 for gap, _ in parts]).tolist()
    rows = apart(*((end - length, end) for end, (_, length) in zip(ends, parts, strict=True)))
    whole, classes = (run(a, rows, fetched(rows)) for a in (batch_latency, latency_histogram))
    for kind in ("latency", "service"):
        assert classes[f"n_by_{kind}"].sum() == whole["n_batches"].sum() == len(parts)
        assert classes[f"{kind}_ns"].sum() == whole[f"{kind}_sum_ns"].sum()
    before, services = None, []
    for start, end in ((r["start_ns"], r["end_ns"]) for r in rows):
        services.append(end - (start if before is None else max(start, before)))
        before = end
    assert whole["service_sum_ns"].sum() == sum(services)


# Gaps ------------------------------------------------------------------------------------------


def test_gaps_of_the_real_capture_are_those_of_the_calibration():
    trace = nsan.open_trace("sample_data/um_vector_add_rtx4060l.sqlite")
    [got] = batch_gaps(trace.gpu_faults, trace.migrations).collect().to_dicts()
    # calibration.md 1: twelve batches, gaps of 65, 88 and 169 us
    assert (got["kind"], got["n_gaps"]) == ("reconstructed", 11)
    for share, expected in ((10, 65), (50, 88), (90, 169)):
        assert got[f"gap_p{share}_ns"] / 1000 == pytest.approx(expected, abs=0.5)


def test_a_gap_is_from_copy_to_copy_and_passes_over_batches_without_one():
    rows = apart((0, 100), (100, 150), (150, 250), (300, 400))
    copies = [
        copy(20, 30, va=A),
        copy(180, 190, va=A + 2 * PAGE_BYTES),
        copy(310, 320, va=A + 3 * PAGE_BYTES),
        copy(330, 340, va=A + VA_BLOCK_BYTES),
    ]
    [got] = run(batch_gaps, rows, copies).to_dicts()
    assert (got["n_gaps"], got["gap_sum_ns"], got["gap_max_ns"]) == (2, 150 + 120, 150)
    assert (got["kind"], got["gap_p50_ns"]) == ("derived", 135)


def test_gaps_do_not_cross_gpus():
    rows = [row(0, 100), row(100, 200, device=1), row(300, 400), row(500, 600, device=1)]
    got = run(batch_gaps, rows, fetched(rows))
    assert got.select("device_id", "gap_sum_ns").rows() == [(0, 297), (1, 397)]


# Fit -------------------------------------------------------------------------------------------


def serviced(contents, service):
    """Rows and copies of batches: (blocks, new blocks, faulted and prefetched pages, evicted)."""
    rows, copies, end, fresh = [], [], 1_000_000, 0
    low = A - VA_BLOCK_BYTES * 64
    rows.append(row(end - 500_000, end, va=low))
    # the first batch brings a page of each old block, and is left out
    copies += [
        copy(end - 400_000 + 100 * i, end - 399_990 + 100 * i, va=low + i * VA_BLOCK_BYTES)
        for i in range(8)
    ]
    for (blocks, new, faulted, extra, evicted), time in zip(contents, service, strict=True):
        at, end = end + 1, end + 1 + round(time)
        old = [low + i * VA_BLOCK_BYTES for i in range(blocks - new)]
        places = old + [A + (fresh + i) * VA_BLOCK_BYTES for i in range(new)]
        fresh += new
        clock = at + 10
        for place in places:
            va = place
            for cause, pages in ((2, faulted), (3, extra)):
                if pages:
                    copies.append(
                        copy(clock, clock + 5, va=va, size=pages * PAGE_BYTES, cause=cause)
                    )
                    va, clock = va + pages * PAGE_BYTES, clock + 6
            clock += 20
        for i in range(evicted):
            gone = A - VA_BLOCK_BYTES * (200 + i)
            copies.append(copy(clock, clock + 5, va=gone, size=VA_BLOCK_BYTES, cause=4, way="dtoh"))
            clock += 20
        rows.append(row(at, end, va=places[0]))
    return rows, copies


def mixed(n, seed=1):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(1, 6, n)
    new = rng.integers(0, blocks + 1)
    return np.column_stack(
        [blocks, new, rng.integers(1, 9, n), rng.integers(0, 40, n), rng.integers(0, 3, n)]
    )


def design(contents):
    blocks, new, faulted, extra, evicted = contents.T
    pages = [blocks * (faulted + extra), blocks * faulted]
    return np.column_stack([np.ones(len(blocks)), blocks, new, *pages, evicted])


TRUE = np.array([20_000, 8_000, 45_000, 200, 700, 90_000])


def fit(contents, service, **options):
    rows, copies = serviced(contents, service)
    return run(service_fit, rows, copies, **options)


def test_a_service_time_that_is_a_sum_of_its_parts_is_taken_apart():
    contents = mixed(60)
    got = fit(contents, design(contents) @ TRUE)
    assert got["term"].to_list() == [*TERMS]
    assert got["estimate_ns"].to_numpy() == pytest.approx(TRUE, rel=1e-6)
    assert got["n_batches"].unique().to_list() == [60]
    assert got["r2"].to_numpy() == pytest.approx(1)
    assert (got["residual_p90_ns"] < 1).all()


def test_estimates_and_intervals_are_those_of_least_squares():
    contents = mixed(80)
    x = design(contents).astype(float)
    y = np.round(x @ TRUE + np.random.default_rng(2).normal(0, 5000, 80))
    got = fit(contents, y)
    # the textbook formula, in another way of computing
    inverse = np.linalg.inv(x.T @ x)
    beta = inverse @ x.T @ y
    residual = y - x @ beta
    error = np.sqrt(residual @ residual / (80 - 6) * np.diag(inverse))
    half = stats.t.ppf(0.975, 80 - 6) * error
    assert got["estimate_ns"].to_numpy() == pytest.approx(beta, rel=1e-6)
    assert got["low_ns"].to_numpy() == pytest.approx(beta - half, rel=1e-6)
    assert got["high_ns"].to_numpy() == pytest.approx(beta + half, rel=1e-6)
    assert got["r2"][0] == pytest.approx(1 - residual @ residual / ((y - y.mean()) ** 2).sum())
    assert got["residual_p50_ns"][0] == pytest.approx(np.median(abs(residual)))


def test_one_term_that_varies_agrees_with_scipy():
    rng = np.random.default_rng(3)
    contents = np.array([(1, 0, 1, n, 0) for n in rng.integers(0, 400, 40)])
    y = np.round(50_000 + 300 * contents[:, 3] + rng.normal(0, 3000, 40))
    got = {r["term"]: r for r in fit(contents, y).to_dicts()}
    line = stats.linregress(contents[:, 3] + 1, y)
    assert got["page_moved"]["estimate_ns"] == pytest.approx(line.slope, rel=1e-6)
    assert got["batch"]["estimate_ns"] == pytest.approx(line.intercept, rel=1e-6)
    half = stats.t.ppf(0.975, 38) * np.array([line.stderr, line.intercept_stderr])
    for name, width in zip(("page_moved", "batch"), half, strict=True):
        assert got[name]["high_ns"] - got[name]["estimate_ns"] == pytest.approx(width, rel=1e-6)
    assert got["batch"]["r2"] == pytest.approx(line.rvalue**2)
    # one block, one faulted page, nothing new and nothing evicted in any batch: not to be told
    rest = [got[name]["estimate_ns"] for name in TERMS if name not in {"batch", "page_moved"}]
    assert rest == [None] * 4


def test_too_few_batches_give_no_fit():
    contents = mixed(19)
    got = fit(contents, design(contents) @ TRUE)
    assert got["estimate_ns"].to_list() == [None] * len(TERMS)
    assert got["n_batches"].to_list() == [19] * len(TERMS)
    assert fit(contents, design(contents) @ TRUE, min_batches=19)["estimate_ns"].null_count() == 0
    few = mixed(5)
    assert fit(few, design(few) @ TRUE, min_batches=0)["r2"].null_count() == len(TERMS)


def test_batches_without_data_do_not_enter_the_fit():
    contents = mixed(30)
    rows, copies = serviced(contents, design(contents) @ TRUE)
    end = rows[-1]["end_ns"]
    rows += [row(end + 1, end + 10**9, va=A + 2**40)]  # first touch
    assert run(service_fit, rows, copies)["n_batches"].unique().to_list() == [30]


@cache
def ping_pong():
    trace = nsan.open_trace("sample_data/model/ping_pong/ping_pong.sqlite")
    return service_fit(trace.gpu_faults, trace.migrations).collect()


def test_on_a_modelled_trace_the_coefficients_of_the_host_come_out():
    """One block per batch: nothing overlaps, so the terms are those that the model adds up."""
    got = {r["term"]: r for r in ping_pong().to_dicts()}
    host = HOSTS["epyc-7763"]
    copying = PAGE_BYTES / 26.8  # ns, at 26.8 GB/s
    for term, expected in (
        ("first_va_block", host.first_block_ns),
        ("page_moved", host.page_ns + copying),
        ("page_faulted", host.fault_ns),
    ):
        assert got[term]["low_ns"] <= expected <= got[term]["high_ns"]
    assert got["first_va_block"]["estimate_ns"] == pytest.approx(host.first_block_ns, rel=0.05)
    assert got["page_moved"]["estimate_ns"] == pytest.approx(host.page_ns + copying, rel=0.05)
    assert got["batch"]["r2"] > 0.95


# Laws of all -----------------------------------------------------------------------------------


@pytest.mark.parametrize("analysis", ALL)
def test_nothing_gives_an_empty_table(analysis):
    assert run(analysis).is_empty()
    assert run(analysis).schema == run(analysis, [row(0, 9)], [copy(1, 2)]).schema


@pytest.mark.parametrize("analysis", ALL)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_rows_does_not_matter(analysis, seed):
    contents = mixed(40)
    rows, copies = serviced(contents, design(contents) @ TRUE)
    rng = np.random.default_rng(seed)
    turned = ([part[i] for i in rng.permutation(len(part))] for part in (rows, copies))
    assert_frame_equal(run(analysis, *turned), run(analysis, rows, copies))


@pytest.mark.parametrize("analysis", ALL)
def test_lost_values_are_no_error(analysis):
    rows = [row(None, 90), row(0, None), row(5, 80, va=None), row(5, 100)]
    copies = [copy(None, 60), copy(50, None), copy(50, 60) | {"va": None}, copy(50, 60)]
    found = run(analysis, rows, copies)
    assert found.schema == run(analysis, [], []).schema
