from __future__ import annotations

import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest

import nsan
from nsan.analysis.views import levels, pyramid, sums
from nsan.analysis.views.events import view_events
from nsan.analysis.views.pyramid import Pyramid
from nsan.analysis.views.tables import CELLS, MARKS, SELECTED, STRIP
from nsan.errors import UsageError
from nsan.schema import TABLES

ROOT = Path(__file__).parents[2]
N = 60 if os.environ.get("NSAN_SOAK") == "1" else 6
MIB = 1 << 20
BLOCK = 2 * MIB
BYS = ("cause", "access", "density", "latency")


def table(name, *rows):
    return pl.LazyFrame(
        [{column: row.get(column) for column in TABLES[name].schema} for row in rows],
        schema=TABLES[name].schema,
    )


def copy(start, va, size=4096, *, cause="coherence", **more):
    known = {"start_ns": start, "end_ns": start + 10, "pid": 1, "device_id": 0, "va": va}
    return {**known, "bytes": size, "cause": cause, "direction": "htod", **more}


def fault(start, end, va, n, access="read", **more):
    known = {"start_ns": start, "end_ns": end, "pid": 1, "device_id": 0, "va": va}
    return {**known, "n_page_faults": n, "access": access, **more}


def of(**tables):
    return Pyramid(view_events({name: table(name, *rows) for name, rows in tables.items()}))


def grid(found, *columns):
    return {(row[0], row[1]): row[2:] for row in found.select("column", "row", *columns).rows()}


def test_a_cell_holds_what_starts_in_it_and_the_cause_that_moved_most():
    found = of(
        migrations=[
            copy(0, 0, 4096),
            copy(9, 0, 8192, cause="prefetch"),
            copy(10, 0, 4096),  # the first of the second column
            copy(19, BLOCK, 100, cause="eviction"),  # the first byte of the second row
        ]
    )
    cells = found.cells((0, 20), (0, 2 * BLOCK), shape=(2, 2))
    assert cells.schema == CELLS.schema
    assert grid(cells, "category", "value", "n", "bytes") == {
        (0, 0): ("prefetch", 12288.0, 2, 12288),
        (1, 0): ("coherence", 4096.0, 1, 4096),
        (1, 1): ("eviction", 100.0, 1, 100),
    }


def test_by_access_page_faults_are_counted():
    found = of(
        gpu_faults=[fault(0, 5, 0, 3), fault(1, 5, 4096, 7, "write"), fault(2, 5, 0, 1, None)],
        migrations=[copy(0, 0)],
    )
    cells = found.cells((0, 10), (0, BLOCK), shape=(1, 1), by="access")
    assert grid(cells, "category", "value", "n", "bytes") == {(0, 0): ("write", 11.0, 3, 0)}


def test_by_density_every_row_counts_once():
    found = of(
        gpu_faults=[fault(0, 5, 0, 3)],
        migrations=[copy(0, 0)],
        cpu_faults=[{"start_ns": 1, "pid": 1, "va": 5}],
    )
    cells = found.cells((0, 10), (0, BLOCK), shape=(1, 1), by="density")
    assert grid(cells, "category", "value", "n", "bytes") == {(0, 0): (None, 3.0, 3, 4096)}


def test_by_latency_the_mean_time_of_fault_rows_is_shown_and_of_copies_where_there_are_none():
    copies = [copy(0, 0, end_ns=30), copy(1, 0, end_ns=51), copy(2, 0, end_ns=None)]
    cells = of(migrations=copies).cells((0, 10), (0, BLOCK), shape=(1, 1), by="latency")
    assert grid(cells, "value", "n") == {(0, 0): (40.0, 3)}
    both = of(migrations=copies, gpu_faults=[fault(0, 7, 0, 1)])
    cells = both.cells((0, 10), (0, BLOCK), shape=(1, 1), by="latency")
    assert grid(cells, "value", "n") == {(0, 0): (7.0, 1)}


def test_a_time_that_is_not_known_is_null():
    cells = of(migrations=[copy(0, 0, end_ns=None)]).cells(
        (0, 10), (0, BLOCK), shape=(1, 1), by="latency"
    )
    assert grid(cells, "value", "n") == {(0, 0): (None, 1)}


def test_where_rows_are_smaller_than_a_block_a_copy_reaches_over_several():
    found = of(migrations=[copy(0, 4096, BLOCK - 4096)])
    cells = found.cells((0, 10), (0, BLOCK), shape=(1, 4))
    assert grid(cells, "n", "bytes") == {
        (0, 0): (1, MIB // 2 - 4096),
        (0, 1): (0, MIB // 2),
        (0, 2): (0, MIB // 2),
        (0, 3): (0, MIB // 2),
    }


def test_a_part_of_the_map_shows_the_bytes_of_a_copy_that_begins_below_it():
    found = of(migrations=[copy(0, 0, BLOCK)])
    cells = found.cells((0, 10), (MIB, MIB + 4096), shape=(1, 2))
    assert grid(cells, "n", "bytes") == {(0, 0): (0, 2048), (0, 1): (0, 2048)}


def test_rows_without_a_place_are_in_the_strip_and_not_on_the_map():
    found = of(migrations=[copy(0, None), copy(1, 0)])
    assert found.cells((0, 10), shape=(1, 1))["n"].sum() == 1
    assert found.strip((0, 10), n_columns=1)["n"].sum() == 2
    assert found.count((0, 10)) == 2
    assert found.count((0, 10), found.all_places) == 1
    assert found.rows((0, 10)).height == 2
    assert found.marks((0, 10)).height == 1


def test_the_strip_tells_layers_and_leaves_out_what_a_table_does_not_have():
    found = of(
        migrations=[copy(0, 0), copy(1, 0), copy(11, 0, None)],
        gpu_faults=[fault(12, 15, 0, 9)],
        cpu_faults=[{"start_ns": 13, "pid": 1, "va": 0}],
    )
    strip = found.strip((0, 20), n_columns=2)
    assert strip.schema == STRIP.schema
    assert strip.rows() == [
        (0, 0, 2, 8192, None),
        (1, 0, 1, 0, None),
        (1, 1, 1, None, 9),
        (1, 2, 1, None, None),
    ]
    assert found.strip((0, 20), n_columns=2, layers=[1])["layer"].to_list() == [1]


def test_marks_are_the_exact_rows_that_touch_a_box_or_none_where_they_are_too_many():
    found = of(
        migrations=[copy(0, 0, BLOCK), copy(5, 8 * MIB, 4096)],
        gpu_faults=[fault(3, 9, MIB + 4096, 2)],
    )
    box = (MIB + 8191, MIB + 8192)  # the last byte of the faulted page
    marks = found.marks((0, 10), box)
    assert marks.schema == MARKS.schema
    assert marks.select("table", "place_start", "place_end").rows() == [
        ("migrations", 0, BLOCK),
        ("gpu_faults", MIB + 4096, MIB + 8192),
    ]
    assert found.marks((0, 10), (MIB + 8192, MIB + 8193))["table"].to_list() == ["migrations"]
    assert found.marks((0, 10), box, most=1) is None
    assert found.marks((0, 10), box, most=2).height == 2
    assert found.marks((0, 10), box, layers=[]).is_empty()


def test_rows_of_a_box_begin_in_it_or_touch_it_if_asked():
    found = of(migrations=[copy(0, 0, BLOCK), copy(1, MIB, 4096), copy(10, MIB, 4096)])
    inside = found.rows((0, 10), (MIB, BLOCK))
    assert inside.schema == SELECTED.schema
    assert inside["start_ns"].to_list() == [1]
    touching = found.rows((0, 10), (MIB, BLOCK), touching=True)
    assert touching["start_ns"].to_list() == [0, 1]


def test_a_window_without_time_or_place_holds_nothing():
    found = of(migrations=[copy(5, 0)])
    for window, place in (((5, 5), (0, BLOCK)), ((9, 2), (0, BLOCK)), ((0, 9), (7, 7))):
        assert found.cells(window, place, shape=(3, 3)).is_empty()
        assert found.fitted(window, place, shape=(3, 3))[2] == (3, 3)
        assert found.count(window, place) == 0
        assert found.rows(window, place).is_empty()


def test_a_capture_without_rows_gives_empty_answers():
    found = of()
    for by in BYS:
        assert found.cells(found.extent, shape=(4, 4), by=by).is_empty()
    assert found.strip(found.extent, n_columns=3).is_empty()
    assert found.marks(found.extent).is_empty()
    assert found.rows(found.extent).is_empty()


def test_windows_far_beyond_the_trace_and_addresses_are_answered():
    found = of(migrations=[copy(5, 0)])
    huge = (-(1 << 70), 1 << 70)
    assert found.cells(huge, huge, shape=(5, 5))["n"].to_list() == [1]
    assert found.count(huge, huge) == 1
    assert found.strip(huge, n_columns=4)["n"].to_list() == [1]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (-1, 1), (1 << 17, 1)])
def test_a_grid_without_cells_or_with_too_many_is_refused(shape):
    with pytest.raises(UsageError, match="columns and rows"):
        of().cells((0, 1), shape=shape)


def test_an_unknown_colouring_is_refused_with_the_names_that_exist():
    with pytest.raises(UsageError, match="latency"):
        of().cells((0, 1), shape=(1, 1), by="colour")


# From here on: grids of samples against plain loops over their rows.


@pytest.fixture(scope="module")
def samples():
    names = ("model/two_gpus/two_gpus.sqlite", "um_vector_add_rtx4060l.sqlite")
    found = []
    for name in names:
        trace = nsan.open_trace(ROOT / "sample_data" / name)
        events = view_events({each: getattr(trace, each) for each in TABLES})
        found.append((events, events.frame.rows(named=True)))
    return found


def edges(span, n):
    low, length = span[0], span[1] - span[0]
    return [low - (-length * i // n) for i in range(n + 1)]


def looped(rows, layers, by, window, place, shape):
    """Fill a grid row by row."""
    (t0, t1), (y0, y1), (columns, n_rows) = window, place, shape
    borders = edges(place, n_rows)
    fine = y1 - y0 < n_rows * BLOCK
    cells = {}
    for row in rows:
        if row["layer"] not in layers or row["place"] is None or not t0 <= row["start_ns"] < t1:
            continue
        column = (row["start_ns"] - t0) * columns // (t1 - t0)
        moved = row["table"] == "migrations"
        size = row["bytes"] or 0
        pieces = {}
        if y0 <= row["place"] < y1:
            at = (row["place"] - y0) * n_rows // (y1 - y0)
            pieces[at] = (1, 0 if fine or not moved else size)
        if fine and moved:
            for at in range(n_rows):
                high = min(borders[at + 1], row["place"] + size)
                overlap = high - max(borders[at], row["place"])
                if overlap > 0:
                    pieces[at] = (pieces.get(at, (0, 0))[0], overlap)
        for at, (n, part) in pieces.items():
            cell = cells.setdefault((column, at), {"n": 0, "bytes": 0, "by": {}, "times": []})
            cell["n"] += n
            cell["bytes"] += part
            kind = row[by] or "unknown" if by in {"cause", "access"} else None
            amount = part if by == "cause" else (row["n_page_faults"] or 0) * n
            cell["by"][kind] = cell["by"].get(kind, 0) + amount
            if n and row["end_ns"] is not None:
                cell["times"].append(row["end_ns"] - row["start_ns"])
    return cells


def agrees(cells, want, by):
    assert {(c, r) for c, r in cells.select("column", "row").rows()} == want.keys()
    for column, row, category, value, n, size in cells.rows():
        cell = want[column, row]
        assert (n, size) == (cell["n"], cell["bytes"])
        if by in {"cause", "access"}:
            assert value == sum(cell["by"].values())
            assert cell["by"][category] == max(cell["by"].values())
        elif by == "density":
            assert value == n
        elif cell["times"]:
            assert value == pytest.approx(sum(cell["times"]) / len(cell["times"]))
    return True


def look(draw, events):
    """Draw a window, a stretch of the map, a shape, a colouring and layers."""
    low, high = events.extent
    window = sorted(draw.sample(range(low - 1000, high + 1000), 2))
    total = events.addresses.total_bytes
    height = draw.choice([total, draw.randrange(1, total), draw.randrange(1, BLOCK)])
    start = draw.randrange(total - height + 1)
    if draw.random() < 0.5:
        start, height = start // 4096 * 4096, -(-height // 4096) * 4096
    layers = events.layers["layer"].to_list()
    chosen = None if draw.random() < 0.5 else draw.sample(layers, draw.randrange(len(layers) + 1))
    shape = (draw.randrange(1, 60), draw.randrange(1, 40))
    return tuple(window), (start, start + height), shape, draw.choice(BYS), chosen


def spoken(found, by, chosen):
    return [each for each in found.layers_of(by) if chosen is None or each in chosen]


def test_a_grid_agrees_with_plain_loops_over_the_rows(samples):
    draw = random.Random(11)
    for events, rows in samples * N:
        found = Pyramid(events)
        window, place, shape, by, chosen = look(draw, events)
        cells = found.cells(window, place, shape=shape, by=by, layers=chosen)
        assert agrees(cells, looped(rows, spoken(found, by, chosen), by, window, place, shape), by)


@pytest.fixture
def coarse(monkeypatch):
    """Use levels for few rows already, so that loops can follow."""
    monkeypatch.setattr(pyramid, "_FEW", 50)
    for module in (levels, pyramid):
        monkeypatch.setattr(module, "SHAPES", ((12, 5), (36, 15), (100, 60)))
    monkeypatch.setattr(levels, "_MOST_SHARE", 2)
    for module in (levels, sums):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 60)


@pytest.mark.usefixtures("coarse")
def test_a_fitted_grid_is_exact_whatever_level_fills_it(samples):
    draw = random.Random(12)
    used = 0
    for events, rows in samples * N:
        found = Pyramid(events)
        for _ in range(8):
            window, place, shape, by, chosen = look(draw, events)
            asked = {"by": by, "layers": chosen}
            fit, fit_place, fit_shape = found.fitted(window, place, shape=shape, **asked)
            assert fit_shape[0] <= shape[0]
            assert fit_shape[1] <= shape[1]
            assert fit[0] <= max(window[0], events.extent[0])
            assert fit[1] >= min(window[1], events.extent[1])
            assert fit_place[0] <= place[0]
            assert fit_place[1] >= place[1]
            cells = found.cells(fit, fit_place, shape=fit_shape, **asked)
            layers = spoken(found, by, chosen)
            assert agrees(cells, looped(rows, layers, by, fit, fit_place, fit_shape), by)
            used += fit_shape != shape
    assert used > N


@pytest.mark.usefixtures("coarse")
def test_the_cells_of_a_tiling_add_up_to_the_rows_of_the_map(samples):
    draw = random.Random(13)
    for events, rows in samples * N:
        found = Pyramid(events)
        by = draw.choice(BYS)
        layers = found.layers_of(by)
        total = events.addresses.total_bytes
        times = sorted([*events.extent, *draw.sample(range(*events.extent), 3)])
        places = sorted([0, total, *draw.sample(range(total), 2)])
        n = size = 0
        for window in pairwise(times):
            for place in pairwise(places):
                cells = found.cells(window, place, shape=(7, 2), by=by)
                n += cells["n"].sum()
                size += cells["bytes"].sum()
        mine = [row for row in rows if row["layer"] in layers and row["place"] is not None]
        assert n == len(mine) == found.count(events.extent, (0, total), layers=layers)
        # By whole copies or by what lies in each row: either adds up, both together need not.
        if all(high - low >= 2 * BLOCK for low, high in pairwise(places)):
            assert size == sum(row["bytes"] or 0 for row in mine)


def test_the_strip_agrees_with_plain_loops_over_the_rows(samples):
    draw = random.Random(14)
    for events, rows in samples * N:
        found = Pyramid(events)
        low, high = sorted(draw.sample(range(events.extent[0] - 9, events.extent[1] + 9), 2))
        n_columns = draw.randrange(1, 40)
        want = {}
        for row in rows:
            if low <= row["start_ns"] < high:
                key = ((row["start_ns"] - low) * n_columns // (high - low), row["layer"])
                figures = want.setdefault(key, [0, 0, 0])
                figures[0] += 1
                figures[1] += row["bytes"] or 0
                figures[2] += row["n_page_faults"] or 0
        strip = found.strip((low, high), n_columns=n_columns)
        got = {(c, layer): [n, size or 0, m or 0] for c, layer, n, size, m in strip.rows()}
        assert got == want
        assert found.count((low, high)) == sum(figures[0] for figures in want.values())


@pytest.mark.usefixtures("coarse")
def test_what_is_held_in_memory_is_told(samples):
    events, _ = samples[0]
    found = Pyramid(events)
    before = found.n_bytes
    assert before == events.n_bytes
    found.cells(events.extent, shape=(12, 5), by="density")
    assert found.n_bytes > before


def some_unknown(n):
    """Copies and fault rows over 40 blocks, of which a third has no end, size or count."""
    draw = random.Random(17)

    def known(value):
        return None if draw.random() < 0.3 else value

    copies = [
        copy(
            at * 10,
            at * 7 % 40 * BLOCK,
            known(draw.choice([0, 4096, 65536])),
            cause=draw.choice(["coherence", "eviction", "prefetch"]),
            end_ns=known(at * 10 + draw.randrange(90)),
        )
        for at in range(n)
    ]
    faults = [
        fault(
            at * 10,
            known(at * 10 + draw.randrange(90)),
            at * 7 % 40 * BLOCK,
            known(draw.randrange(3)),
            draw.choice(["read", "write"]),
        )
        for at in range(n)
    ]
    return copies, faults


def known_figures(rows, by, window, place, shape):
    """Collect by cell what is known, of a map that begins at the first block, and the amounts and rows by category."""
    found = {}
    for row in rows:
        if window[0] <= row["start_ns"] < window[1]:
            column = (row["start_ns"] - window[0]) * shape[0] // (window[1] - window[0])
            at = column, row["va"] * shape[1] // place[1]
            cell = found.setdefault(at, {"n": 0, "figures": [], "most": {}})
            cell["n"] += 1
            figure = row.get("bytes" if by == "cause" else "n_page_faults")
            if by == "latency":
                figure = None if row["end_ns"] is None else row["end_ns"] - row["start_ns"]
            if figure is not None:
                cell["figures"].append(figure)
            amount, n = cell["most"].get(row.get(by), (0, 0))
            cell["most"][row.get(by)] = amount + (figure or 0), n + 1
    return found


def summed(figures, by):
    if not figures:
        return None
    return sum(figures) / len(figures) if by == "latency" else sum(figures)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("by", ["cause", "access", "latency"])
@pytest.mark.parametrize("n", [40, 600])
def test_a_figure_that_is_not_known_counts_in_n_and_nowhere_else_whatever_fills_the_grid(by, n):
    copies, faults = some_unknown(n)
    found = of(migrations=copies) if by != "access" else of(gpu_faults=faults)
    window, place, shape = found.fitted(found.extent, (0, 40 * BLOCK), shape=(30, 10), by=by)
    assert (shape != (30, 10)) == (n > 40)  # many rows: a level fills it
    cells = found.cells(window, place, shape=shape, by=by)
    want = known_figures(copies if by != "access" else faults, by, window, place, shape)
    assert {each[:2] for each in cells.rows()} == want.keys()
    for column, row, category, value, count, _ in cells.rows():
        cell = want[column, row]
        assert (value, count) == (pytest.approx(summed(cell["figures"], by)), cell["n"])
        if by != "latency":
            assert cell["most"][category][0] == max(amount for amount, _ in cell["most"].values())
            if not value:
                assert cell["most"][category] == max(cell["most"].values())


def test_a_copy_of_unknown_size_has_a_cell_with_its_cause_and_no_value():
    found = of(migrations=[copy(0, 0), copy(5, 4 * BLOCK, None, cause="eviction")])
    cells = found.cells((0, 10), (0, 8 * BLOCK), shape=(2, 8))
    assert grid(cells, "category", "value", "n") == {
        (0, 0): ("coherence", 4096.0, 1),
        (1, 1): ("eviction", None, 1),  # the gap is folded
    }
    fine = found.cells((0, 10), (BLOCK, 2 * BLOCK), shape=(2, 8))
    assert grid(fine, "category", "value", "n") == {(1, 0): ("eviction", None, 1)}


def test_a_copy_that_took_no_time_and_one_of_no_bytes_are_known():
    found = of(migrations=[copy(0, 0, 0, end_ns=0, cause="eviction")])
    for by, category in (("latency", None), ("cause", "eviction")):
        cells = found.cells((0, 10), (0, BLOCK), shape=(1, 1), by=by)
        assert grid(cells, "category", "value", "n") == {(0, 0): (category, 0.0, 1)}


# Levels that a thread in the background makes.


@pytest.mark.usefixtures("coarse")
def test_after_warming_nobody_waits_for_a_level(samples, monkeypatch):
    draw = random.Random(18)
    for events, rows in samples:
        found = Pyramid(events)
        found.warm()
        with monkeypatch.context() as patch:
            patch.setattr(levels.Level, "build", None)  # a call would fail
            for _ in range(20):
                window, place, shape, by, chosen = look(draw, events)
                asked = {"by": by, "layers": chosen}
                fit, fit_place, fit_shape = found.fitted(window, place, shape=shape, **asked)
                cells = found.cells(fit, fit_place, shape=fit_shape, **asked)
                want = looped(rows, spoken(found, by, chosen), by, fit, fit_place, fit_shape)
                assert agrees(cells, want, by)


@pytest.mark.usefixtures("coarse")
def test_while_a_level_is_made_looks_are_answered_from_the_rows(samples, monkeypatch):
    monkeypatch.setattr(pyramid, "_BRIEF", 1 << 20)
    events, rows = samples[0]
    found, begun, go_on = Pyramid(events), threading.Event(), threading.Event()
    build = levels.Level.build

    def slow(*args, **options):
        begun.set()
        assert go_on.wait(30)
        return build(*args, **options)

    monkeypatch.setattr(levels.Level, "build", slow)
    work = threading.Thread(target=found.warm)
    work.start()
    try:
        assert begun.wait(30)
        total = events.addresses.total_bytes
        place = (0, max(total, 30 * BLOCK))
        fit = found.fitted(events.extent, place, shape=(20, 7))
        assert fit == (events.extent, place, (20, 7))
    finally:
        go_on.set()
        work.join(30)
    # The level that is there by now would fill other cells: it stays as it was decided.
    cells = found.cells(events.extent, place, shape=(20, 7))
    want = looped(rows, spoken(found, "cause", None), "cause", events.extent, place, (20, 7))
    assert agrees(cells, want, "cause")
    assert found.fitted(events.extent, place, shape=(20, 7)) != fit


@pytest.mark.usefixtures("coarse")
def test_levels_wait_while_somebody_asks(samples, monkeypatch):
    monkeypatch.setattr(levels, "_LONGEST_WAIT_S", 30)
    kept = levels.Levels(samples[0][0], 1)
    work = threading.Thread(target=kept.warm)
    with kept.asking():
        work.start()
        work.join(0.2)
        assert not kept.made()
        assert work.is_alive()
    work.join(30)
    assert kept.made()
    assert not work.is_alive()


def test_a_level_with_too_many_entries_is_given_up_and_so_are_finer_ones(monkeypatch):
    monkeypatch.setattr(levels, "_MOST_SHARE", 0.4)
    events = view_events({"migrations": table("migrations", *some_unknown(300)[0])})
    kept = levels.Levels(events, 1)
    part = events.parts["migrations"]
    assert kept.get(part, 0).n.sum() == 300
    assert kept.get(part, 1) is None  # hardly two of the rows share a bin
    assert kept.is_known(part, 2)
    assert not levels.Levels(events, 1).is_known(part, 2)


@pytest.mark.usefixtures("coarse")
def test_a_trace_of_thirty_years_is_added_up_exactly():
    step = 10**16
    copies = [copy(at * step, at % 40 * BLOCK, end_ns=at * step + 5) for at in range(101)]
    found = of(migrations=copies)
    assert found.extent == (0, 10**18 + 6)
    for by in BYS:
        fit = found.fitted(found.extent, shape=(12, 5), by=by)
        cells = found.cells(fit[0], fit[1], shape=fit[2], by=by)
        want = known_figures(copies if by != "access" else [], by, *fit)
        assert {row[:2]: row[4] for row in cells.rows()} == {at: want[at]["n"] for at in want}
        if by == "latency":
            assert set(cells["value"]) == {5.0}
    strip = found.strip(found.extent, n_columns=480)
    assert strip.select("column", "n").rows() == [
        (at * step * 480 // (10**18 + 6), 1) for at in range(101)
    ]
