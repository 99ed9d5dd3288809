"""Two conditions compared: ratios with intervals, parts that add up, and switches."""

from __future__ import annotations

import itertools
import math
import os
import random
from fractions import Fraction

import polars as pl
import pytest

from nsan.analysis.driver.batches import BATCHES
from nsan.analysis.pca.costs import STEP_COSTS, CostInput, step_costs
from nsan.analysis.pca.decomposition import FORMULAS, MECHANISMS, decomposition
from nsan.analysis.pca.first_touch import LedgerInput, ledger_input
from nsan.analysis.pca.ratios import COUNTED, FIGURES, ratios, warm_steps
from nsan.analysis.pca.switches import at_work, causal_parts
from nsan.analysis.pca.tables import JOINED_TABLES, STEP_LEDGER
from nsan.schema import TABLES
from nsan.uvm.constants import VA_BLOCK_BYTES

N = 200 if os.environ.get("NSAN_SOAK") == "1" else 10


SCHEMA = {**STEP_LEDGER.schema, **STEP_COSTS.schema}


def ledger(*steps, **each):
    """Make a ledger of one GPU: a mapping per step over zeros; ``each`` is the same in all steps."""
    zeros = dict.fromkeys(SCHEMA, 0)
    rows = [{**zeros, "step": i, **each, **step} for i, step in enumerate(steps)]
    return pl.DataFrame(rows, schema=SCHEMA)


def warm(*steps, **each):
    return warm_steps(ledger(*steps, **each), warmup=0)


def anything(rng, n_steps):
    """Make a ledger of random whole numbers: counts, and bytes and times of the size of hours."""
    most = {name: 10**5 if name.startswith("n_") else 10**13 for name in (*COUNTED, "wall_ns")}
    return warm(*({name: rng.randrange(n) for name, n in most.items()} for _ in range(n_steps)))


def of(frame, **key):
    """Give the one row with these values."""
    (row,) = frame.filter(**key).to_dicts()
    return row


# Steps ----------------------------------------------------------------------------------------------


def test_gpus_of_a_step_add_up_and_its_times_are_those_of_one():
    frame = pl.concat(
        [
            ledger({"in_bytes": 5, "wall_ns": 70, "idle_ns": 9}, {"in_bytes": 1, "wall_ns": 10}),
            ledger({"in_bytes": 7, "wall_ns": 60, "idle_ns": 2}, {"in_bytes": 2}, device_id=1),
            ledger({"in_bytes": 9, "wall_ns": 50, "idle_ns": 1}, {"wall_ns": 20}, pid=8),
        ]
    )
    found = warm_steps(frame, warmup=0)
    rows = found.select("step", "in_bytes", "wall_ns", "idle_ns").rows()
    assert rows == [(0, 21, 70, 4.0), (1, 3, 20, 0.0)]
    assert warm_steps(frame, warmup=1)["step"].to_list() == [1]
    assert warm_steps(frame, warmup=2).height == 0


def test_a_ledger_without_its_costs_leaves_them_unknown():
    bare = ledger({"in_bytes": 5}).select([*STEP_LEDGER.schema])
    found = warm_steps(bare, warmup=0)
    assert found["in_bytes"].to_list() == [5]
    assert found["idle_ns"].to_list() == [None]


def test_a_sum_with_an_unknown_gpu_is_unknown_and_never_0():
    frame = pl.concat([ledger({"n_fault_rows": 3}), ledger({"n_fault_rows": None}, device_id=1)])
    found = warm_steps(frame, warmup=0)
    assert found["n_fault_rows"].to_list() == [None]
    assert found["in_bytes"].to_list() == [0]


def costs_of(frame, *, work, migrations, calls):
    """Split steps of a program without faults and tensors."""
    tables = {**TABLES, **JOINED_TABLES}
    empty = {name: table.empty() for name, table in tables.items()}
    moved = [
        {"start_ns": a, "end_ns": b, "direction": "dtoh", "cause": "user"} for a, b in migrations
    ]
    empty["migrations"] = pl.LazyFrame(
        [{"pid": 0, "device_id": 0, "va": 0, "bytes": 4096, **row} for row in moved],
        schema=TABLES["migrations"].schema,
    )
    names = ("tensor_moves", "tensor_faults", "tensor_lives")
    names += ("allocations", "gpu_faults", "migrations")
    busy = pl.LazyFrame(
        [(0, 0, a, b) for a, b in work],
        schema={name: frame.schema[name] for name in ("pid", "device_id", "start_ns", "end_ns")},
        orient="row",
    )
    api = pl.LazyFrame(
        [{"pid": 0, "start_ns": a, "end_ns": b, "name": name} for a, b, name in calls],
        schema=TABLES["api_calls"].schema,
    )
    found = ledger_input(*(empty[name] for name in names))
    return step_costs(frame, CostInput(found, busy, api))


def test_a_gpu_is_idle_while_nothing_runs_and_nothing_is_copied():
    steps = (
        {"start_ns": 0, "end_ns": 100, "wall_ns": 100},
        {"start_ns": 100, "end_ns": 200, "wall_ns": 100, "n_first_touch": None},
    )
    found = costs_of(
        ledger(*steps),
        work=[(10, 20), (90, 130), (15, 18)],
        migrations=[(30, 40), (300, 310)],
        calls=[
            (40, 60, "cudaFree_v3020"),
            (70, 80, "cudaLaunchKernel_v7000"),
            (150, 160, "cudaMallocManaged_v6000"),
        ],
    )
    names = ("step", "idle_ns", "other_idle_ns", "rest_ns", "data_only_ns")
    assert found.select(names).rows() == [(0, 70, 50, 30, 0), (1, 70, 60, None, None)]


def served_costs(frame, *, batches=(), moves=(), lives=()):
    """Split steps in which nothing else runs, of batches and copies as they are given."""
    place = {"pid": 0, "device_id": 0}
    of_move = {"state": "live", "bytes": 4096, "va": 0, "position": 0, "cause": "coherence"}
    rows = {
        "batches": [{"batch_id": i, "va": 0, **place, **row} for i, row in enumerate(batches)],
        "moves": [{"migration": i, **place, **of_move, **row} for i, row in enumerate(moves)],
        "lives": [{"tensor_id": i, **place, **row} for i, row in enumerate(lives)],
    }
    schemas = {
        "moves": JOINED_TABLES["tensor_moves"].schema,
        "faults": JOINED_TABLES["tensor_faults"].schema,
        "lives": JOINED_TABLES["tensor_lives"].schema,
        **{name: TABLES[name].schema for name in ("allocations", "gpu_faults", "migrations")},
        "batches": BATCHES.schema,
    }
    found = LedgerInput(*(pl.DataFrame(rows.get(n, []), schema=c) for n, c in schemas.items()))
    times = ("pid", "device_id", "start_ns", "end_ns")
    nothing = pl.LazyFrame(schema={name: frame.schema[name] for name in times})
    return step_costs(frame, CostInput(found, nothing, TABLES["api_calls"].empty()))


def test_service_is_split_by_what_it_was_for_and_no_copy_is_booked_twice():
    copies = (
        # Batch 1 brings dead bytes alone, and evicts others: 100 less 30 and 20.
        *({"batch_id": 1, "direction": "htod", "start_ns": 110, "end_ns": 140, "is_dead": True},),
        *({"batch_id": 1, "direction": "dtoh", "start_ns": 140, "end_ns": 160, "is_dead": True},),
        # Batch 2 brings living bytes, and its evictions overlap: 60 of 50, and not -10.
        *({"batch_id": 2, "direction": "htod", "start_ns": 300, "end_ns": 310, "is_dead": False},),
        *({"batch_id": 2, "direction": "dtoh", "start_ns": 300, "end_ns": 345, "is_dead": True},),
        *({"batch_id": 2, "direction": "dtoh", "start_ns": 300, "end_ns": 315, "is_dead": True},),
        *({"batch_id": 3, "direction": "htod", "start_ns": 400, "end_ns": 430, "is_dead": False},),
        # A copy of no batch is none of their service.
        *({"direction": "dtoh", "start_ns": 500, "end_ns": 525, "is_dead": True, "cause": "user"},),
    )
    batches = (
        {"start_ns": 10, "service_ns": 40, "outcome": "first_touch"},
        {"start_ns": 100, "service_ns": 100, "outcome": "data"},
        {"start_ns": 300, "service_ns": 50, "outcome": "data"},
        {"start_ns": 400, "service_ns": 70, "outcome": "data"},
        {"start_ns": 600, "service_ns": 45, "outcome": "first_touch"},
    )
    booked = {"dead_in_ns": 30, "dead_out_ns": 20 + 45 + 15 + 25, "neighbour_in_ns": 8}
    step = {"start_ns": 0, "end_ns": 1000, "wall_ns": 1000, **booked}
    (row,) = served_costs(ledger(step), batches=batches, moves=copies).to_dicts()
    assert (row["new_only_ns"], row["data_only_ns"]) == (40 + 45 + 50, 0 + 70)
    assert row["least_first_touch_ns"] == 40
    assert row["idle_ns"] == 1000
    assert row["rest_ns"] == 1000 - 1000 - 135 - 70 - 135 - 8


@pytest.mark.parametrize("unknown", ["n_first_touch", "n_dead_rows"])
def test_where_the_marks_are_unknown_the_split_of_service_is(unknown):
    step = {"start_ns": 0, "end_ns": 9, "wall_ns": 9, unknown: None}
    (row,) = served_costs(ledger(step)).to_dicts()
    names = ("new_only_ns", "data_only_ns", "rest_ns", "n_packed_new")
    assert [row[name] for name in names] == [None] * 4
    assert (row["idle_ns"], row["n_packed_tensors"], row["mixed_dead_in_bytes"]) == (9, 0, 0)


def test_packed_tensors_count_where_a_first_touch_of_their_step_fell():
    steps = ({"start_ns": 0, "end_ns": 100}, {"start_ns": 100, "end_ns": 200})
    places = (0, 512, VA_BLOCK_BYTES, VA_BLOCK_BYTES + 512, 2 * VA_BLOCK_BYTES)
    lives = [
        {"va": va, "block_bytes": 512, "alloc_sequence": i, "alloc_ns": i + 1}
        for i, va in enumerate(places)
    ]
    batches = (
        {"start_ns": 50, "service_ns": 5, "va": 4096, "outcome": "first_touch"},
        # Not the same step, and not a first touch.
        {"start_ns": 150, "service_ns": 5, "va": VA_BLOCK_BYTES, "outcome": "first_touch"},
        {"start_ns": 60, "service_ns": 5, "va": VA_BLOCK_BYTES, "outcome": "data"},
    )
    dead = {"batch_id": 2, "direction": "htod", "is_dead": True, "start_ns": 61, "end_ns": 62}
    found = served_costs(ledger(*steps), batches=batches, moves=[dead], lives=lives)
    assert found["n_packed_tensors"].to_list() == [2, 0]
    assert found["n_packed_new"].to_list() == [1, 0]


# Ratios ---------------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_the_means():
    off = warm({"n_fault_rows": 4}, {"n_fault_rows": 8})
    on = warm({"n_fault_rows": 1}, {"n_fault_rows": 2}, {"n_fault_rows": 6})
    row = of(ratios(off, on), figure="fault_rows")
    assert (row["off"], row["on"], row["ratio"]) == (6.0, 3.0, 0.5)
    assert (row["n_off_steps"], row["n_on_steps"], row["unit"]) == (2, 3, "fault rows")


def test_the_interval_of_two_steps_each_spans_all_that_can_be_drawn():
    """Each extreme of nine ratios comes in 1 of 16 draws, more than the 2.5 % that are cut off."""
    row = of(
        ratios(warm({"wall_ns": 10}, {"wall_ns": 20}), warm({"wall_ns": 6}, {"wall_ns": 30})),
        figure="step_ns",
    )
    assert (row["ratio_low"], row["ratio_high"]) == (pytest.approx(6 / 20), pytest.approx(30 / 10))


def test_the_interval_holds_95_percent_of_what_can_be_drawn():
    """Oracle: every one of the 256 x 4 equally likely draws of four steps and of two."""
    off, on = (100, 130, 170, 400), (60, 75)
    row = of(
        ratios(warm(*({"in_bytes": n} for n in off)), warm(*({"in_bytes": n} for n in on))),
        figure="in_bytes",
    )
    drawn = sorted(
        (sum(a) / 2) / (sum(b) / 4)
        for a in itertools.product(on, repeat=2)
        for b in itertools.product(off, repeat=4)
    )
    for end, share in (("ratio_low", 0.025), ("ratio_high", 0.975)):
        around = (drawn[int((share - 0.012) * 1024)], drawn[int((share + 0.012) * 1024)])
        assert around[0] <= row[end] <= around[1]


def test_the_same_steps_give_the_same_interval_again():
    rng = random.Random(3)
    off, on = anything(rng, 5), anything(rng, 6)
    assert ratios(off, on).equals(ratios(off, on))
    assert not ratios(off, on).equals(ratios(off, on, seed=2))


def test_one_warm_step_has_a_ratio_and_no_interval():
    row = of(
        ratios(warm({"out_bytes": 4}), warm({"out_bytes": 2}, {"out_bytes": 4})), figure="out_bytes"
    )
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (0.75, None, None)


@pytest.mark.parametrize("on", [0, 5])
def test_nothing_without_the_cache_is_no_ratio(on):
    row = of(ratios(warm({}, {}), warm({"in_bytes": on}, {"in_bytes": on})), figure="in_bytes")
    assert (row["off"], row["on"]) == (0.0, on)
    assert row["ratio"] is row["ratio_low"] is row["ratio_high"] is None


def test_a_step_of_nothing_leaves_the_ratio_without_an_upper_end():
    row = of(
        ratios(warm({"in_bytes": 0}, {"in_bytes": 8}), warm({"in_bytes": 8}, {"in_bytes": 8})),
        figure="in_bytes",
    )
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (2.0, 1.0, None)


def test_draws_of_nothing_on_both_sides_say_nothing():
    found = warm({"in_bytes": 0}, {"in_bytes": 8})
    row = of(ratios(found, found), figure="in_bytes")
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (1.0, 0.0, None)


def test_an_unknown_figure_has_no_ratio_and_leaves_the_others():
    off, on = (
        warm({"wall_ns": 4}, {"wall_ns": 4}, n_fault_rows=None),
        warm({"wall_ns": 2}, {"wall_ns": 2}),
    )
    found = ratios(off, on)
    assert of(found, figure="fault_rows")["off"] is None
    assert of(found, figure="fault_rows")["ratio"] is None
    assert of(found, figure="step_ns")["ratio"] == 0.5


# Decomposition --------------------------------------------------------------------------------------


def values_of(frame, figure):
    return dict(frame.filter(figure=figure).select("part", "value").rows())


OFF = {
    "n_fault_rows": 100,
    "n_first_touch": 60,
    "n_packed_tensors": 28,
    "n_packed_new": 27,
    "in_bytes": 1000,
    "out_bytes": 900,
    "wall_ns": 50_000,
    "idle_ns": 9_000,
    "other_idle_ns": 700,
    "new_only_ns": 30_000,
    "least_first_touch_ns": 40,
    "rest_ns": 300,
}
ON = {
    "n_fault_rows": 70,
    "n_first_touch": 10,
    "n_packed_tensors": 25,
    "n_packed_new": 7,
    "n_dead_rows": 5,
    "in_bytes": 1400,
    "out_bytes": 1700,
    "dead_in_bytes": 250,
    "mixed_dead_in_bytes": 30,
    "dead_out_bytes": 600,
    "mixed_dead_out_bytes": 10,
    "neighbour_in_bytes": 90,
    "neighbour_out_bytes": 40,
    "wall_ns": 45_000,
    "idle_ns": 600,
    "other_idle_ns": 500,
    "new_only_ns": 6_500,
    "least_first_touch_ns": 60,
    "dead_in_ns": 900,
    "dead_out_ns": 600,
    "neighbour_in_ns": 100,
    "neighbour_out_ns": 50,
    "rest_ns": 400,
}


def test_the_parts_are_those_worked_out_by_hand():
    found = decomposition(warm(OFF, OFF), warm(ON, ON))
    names = ("difference", "reuse", "dead", "packing", "remainder")
    by_figure = {f: tuple(values_of(found, f)[name] for name in names) for f in FORMULAS}
    assert by_figure == {
        "fault_rows": (-30, -45, 0, None, 15),
        "in_bytes": (400, 0, 250, 90, 60),
        "out_bytes": (800, 0, 600, 40, 160),
        "step_ns": (-5_000, -31_900, 1_500, 150, 25_250),
    }


def test_systematic_errors_say_how_much_of_a_part_may_be_of_another_mechanism():
    found = decomposition(warm(OFF, OFF), warm(ON, ON))
    error = {
        (row["figure"], row["part"]): (row["systematic_error"], row["bound"])
        for row in found.to_dicts()
    }
    # 3 tensors that only the side without the cache packs, 7 where first touches fell on the other.
    assert error["fault_rows", "reuse"] == (3 + 7, "estimate")
    assert error["fault_rows", "dead"] == (0, "exact")
    assert error["fault_rows", "packing"] == (None, None)
    assert error["in_bytes", "reuse"] == (0, "exact")
    assert error["in_bytes", "dead"] == (30, "estimate")
    assert error["out_bytes", "dead"] == (10, "estimate")
    assert error["in_bytes", "packing"] == (90, "upper")
    # As much computing as is seen, 200 of idle time elsewhere, 10 tensors at 60 ns.
    reuse = 400 + 200 + 10 * 60
    assert error["step_ns", "reuse"] == (reuse, "estimate")
    assert error["step_ns", "dead"] == (400, "estimate")
    assert error["step_ns", "packing"] == (150, "upper")
    assert error["step_ns", "remainder"] == (reuse + 400 + 150, "estimate")
    assert error["step_ns", "difference"] == (0, "exact")


def test_no_more_computing_is_hidden_than_there_is_service():
    short = {**ON, "dead_in_ns": 90, "dead_out_ns": 30}
    found = decomposition(warm(OFF, OFF), warm(short, short))
    assert of(found, figure="step_ns", part="dead")["systematic_error"] == 120


def test_the_statistical_error_is_the_standard_error_of_a_difference_of_means():
    off = warm({"in_bytes": 10, "dead_in_bytes": 4}, {"in_bytes": 30, "dead_in_bytes": 4})
    on = warm(*({"in_bytes": n, "dead_in_bytes": n // 2} for n in (100, 140, 180)))
    found = decomposition(off, on)
    # Variance 200 of 2 steps and 1600 of 3; of the dead bytes 0 and 400; of what is left 200 and 400.
    assert of(found, figure="in_bytes", part="difference")["error"] == math.ceil(
        math.sqrt(200 / 2 + 1600 / 3)
    )
    dead = of(found, figure="in_bytes", part="dead")
    assert (dead["value"], dead["statistical_error"]) == (66, math.ceil(math.sqrt(400 / 3)))
    rest = of(found, figure="in_bytes", part="remainder")
    assert rest["statistical_error"] == math.ceil(math.sqrt(200 / 2 + 400 / 3))


def test_one_warm_step_leaves_errors_unknown_and_the_parts_known():
    found = decomposition(warm(OFF), warm(ON, ON))
    row = of(found, figure="in_bytes", part="dead")
    assert (row["value"], row["statistical_error"], row["error"]) == (250, None, None)
    assert row["systematic_error"] == 30


def test_parts_and_remainder_add_up_to_the_difference_whatever_the_steps():
    rng = random.Random(7)
    for _ in range(N):
        found = decomposition(
            anything(rng, rng.randrange(1, 6)), anything(rng, rng.randrange(1, 6))
        )
        for figure in FORMULAS:
            values = values_of(found, figure)
            whole = values.pop("difference")
            assert sum(value for value in values.values() if value is not None) == whole


def test_the_difference_is_that_of_the_means_to_the_nearest_whole_number():
    rng = random.Random(8)
    for _ in range(N):
        off, on = anything(rng, 3), anything(rng, 4)
        found = decomposition(off, on)
        for figure in FORMULAS:
            column = FIGURES[figure].column
            exact = Fraction(sum(on[column]), 4) - Fraction(sum(off[column]), 3)
            assert abs(values_of(found, figure)["difference"] - exact) <= Fraction(1, 2) + Fraction(
                1, 1000
            )


def test_two_runs_alike_differ_in_no_part():
    rng = random.Random(9)
    same = anything(rng, 4)
    found = decomposition(same, same)
    assert found["value"].drop_nulls().unique().to_list() == [0]


def test_a_mechanism_that_moved_nothing_has_a_part_of_exactly_0():
    silent = {**ON, **{name: 0 for name in ON if "dead" in name}}
    found = decomposition(warm(OFF, OFF), warm(silent, silent)).filter(part="dead")
    assert found["value"].to_list() == [0, 0, 0, 0]
    assert found["error"].to_list() == [0, 0, 0, 0]


def test_a_cached_step_without_first_touches_has_no_doubt_of_its_fault_rows():
    steady = {**ON, "n_packed_tensors": 40, "n_packed_new": 0}
    row = of(decomposition(warm(OFF), warm(steady)), figure="fault_rows", part="reuse")
    assert (row["value"], row["systematic_error"], row["bound"]) == (-45, 0, "exact")


def test_what_a_run_does_not_know_is_unknown_and_in_the_remainder():
    words = ("dead", "neighbour", "packed", "new_only", "rest")
    unknown = {name: None for name in ON if any(word in name for word in words)}
    found = decomposition(warm(OFF, OFF), warm({**ON, **unknown}, {**ON, **unknown}))
    assert values_of(found, "in_bytes") == {
        "difference": 400,
        "reuse": 0,
        "dead": None,
        "packing": None,
        "remainder": 400,
    }
    assert values_of(found, "step_ns")["remainder"] == -5_000
    assert values_of(found, "fault_rows")["remainder"] == -30
    assert of(found, figure="fault_rows", part="reuse")["value"] is None


def test_of_unknown_packing_the_part_is_known_and_its_error_is_not():
    found = decomposition(warm(OFF, OFF), warm(*[{**ON, "n_packed_new": None}] * 2))
    row = of(found, figure="fault_rows", part="reuse")
    assert (row["value"], row["systematic_error"], row["error"]) == (-45, None, None)


def test_an_unknown_figure_has_an_unknown_difference_and_remainder():
    found = decomposition(warm({**OFF, "n_fault_rows": None}, OFF), warm(ON, ON))
    values = values_of(found, "fault_rows")
    assert values["difference"] is values["remainder"] is None
    assert values["reuse"] == -45


# Switches -------------------------------------------------------------------------------------------

SETS = [frozenset(c) for n in range(4) for c in itertools.combinations(MECHANISMS, n)]


def levels(numbers, column="wall_ns"):
    return {s: warm({column: n}, {column: n}) for s, n in numbers.items()}


def test_a_switch_takes_its_mechanism_away():
    assert at_work(frozenset()) == frozenset(MECHANISMS)
    assert at_work({"release"}) == {"dead", "packing"}
    assert at_work({"release", "drop", "apart"}) == frozenset()


def test_mechanisms_that_do_not_touch_each_other_have_their_own_effect_and_no_spread():
    own = {"reuse": -700, "dead": 300, "packing": 45}
    runs = levels({s: 1000 + sum(own[each] for each in s) for s in SETS})
    found = causal_parts(runs, warm({"wall_ns": 990})).filter(figure="step_ns")
    values = values_of(found, "step_ns")
    assert values == {"difference": -345, **own, "remainder": 10}
    for each in MECHANISMS:
        row = of(found, part=each)
        assert row["low"] == row["high"] == own[each]
        assert row["method"] == "shapley"


def test_an_effect_that_needs_two_mechanisms_is_shared_by_them():
    runs = levels({s: 60 * ({"dead", "packing"} <= s) for s in SETS})
    found = causal_parts(runs, warm({})).filter(figure="step_ns")
    assert values_of(found, "step_ns") == {
        "difference": 60, "reuse": 0, "dead": 30, "packing": 30, "remainder": 0
    }  # fmt: skip
    assert (of(found, part="dead")["low"], of(found, part="dead")["high"]) == (0, 60)


def test_the_parts_are_shapley_values_and_add_up_in_whole_numbers():
    """Oracle: the weighted sum over sets, instead of the mean over orders."""
    rng = random.Random(11)
    for _ in range(N):
        numbers = {s: rng.randrange(10**9) for s in SETS}
        raw = rng.randrange(10**9)
        found = causal_parts(levels(numbers), warm({"wall_ns": raw})).filter(figure="step_ns")
        values = values_of(found, "step_ns")
        assert values["remainder"] == numbers[frozenset()] - raw
        assert sum(values[m] for m in (*MECHANISMS, "remainder")) == values["difference"]
        for each in MECHANISMS:
            others = [s for s in SETS if each not in s]
            exact = sum(
                Fraction(math.factorial(len(s)) * math.factorial(2 - len(s)), 6)
                * (numbers[s | {each}] - numbers[s])
                for s in others
            )
            assert abs(values[each] - exact) < 1
            row = of(found, part=each)
            effects = [numbers[s | {each}] - numbers[s] for s in others]
            assert (row["low"], row["high"]) == (min(effects), max(effects))


def test_parts_of_means_that_are_not_whole_add_up_all_the_same():
    rng = random.Random(12)
    for _ in range(N):
        steps = [[rng.randrange(1000) for _ in range(3)] for _ in range(9)]
        runs = {
            s: warm(*({"wall_ns": n} for n in own)) for s, own in zip(SETS, steps, strict=False)
        }
        raw = warm(*({"wall_ns": n} for n in steps[8]))
        values = values_of(causal_parts(runs, raw), "step_ns")
        exact = Fraction(sum(steps[SETS.index(frozenset(MECHANISMS))]) - sum(steps[8]), 3)
        assert values["difference"] == round(exact)
        assert sum(values[m] for m in (*MECHANISMS, "remainder")) == values["difference"]


def test_fewer_runs_say_what_each_adds_to_the_others_and_no_more():
    everything = frozenset(MECHANISMS)
    runs = levels({everything: 100, everything - {"dead"}: 70, frozenset({"reuse"}): 5})
    found = causal_parts(runs, warm({"wall_ns": 90})).filter(figure="step_ns")
    assert found.select("part", "method", "value").rows() == [
        ("difference", None, 10),
        ("dead", "without it", 30),
        ("remainder", None, None),
    ]


def test_the_caching_allocator_alone_says_nothing_of_switches():
    assert causal_parts(levels({frozenset(MECHANISMS): 3}), warm({})).is_empty()
    assert causal_parts({}, None).is_empty()
