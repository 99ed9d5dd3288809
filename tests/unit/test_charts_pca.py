"""What the caching allocator changes over factors, as frames and as charts; and traffic of two traces on one scale."""

from __future__ import annotations

import exports as x
import polars as pl
import pytest

import nsan
from nsan.charts.palette import CAUSES
from nsan.charts.pca import PARTS, pca_account, pca_effect
from nsan.charts.saving import rendered
from nsan.charts.theme import accent
from nsan.charts.traffic import migrations_of_two
from nsan.errors import UsageError
from nsan.pca_document import find_pairs
from nsan.pca_effects import ACCOUNT, EFFECTS, account, effects
from nsan.schema import CAUSE, DIRECTION
from nsan.text import cause_word
from nsan.units import MIB

HOSTILE = "</script><img src=x onerror=alert(1)>"


def pair(factor, *, off, on, ratio=None, low=None, high=None, **about):
    """A pair of a document: every figure with the same numbers."""
    numbers = {"off": off, "on": on, "ratio": ratio, "ratio_low": low, "ratio_high": high}
    units = {"fault_rows": "fault rows", "first_touches": "batches", "step_ns": "ns"}
    units |= {"in_bytes": "byte", "out_bytes": "byte"}
    parts = {"difference": 10, "reuse": -4, "dead": 12, "packing": None, "remainder": 2}
    rows = [
        {"figure": figure, "unit": unit, "part": part, "value": value, "error": 1}
        for figure, unit in units.items()
        if figure != "first_touches"
        for part, value in parts.items()
    ]
    return {
        "network": "net",
        "factor": factor,
        "hint": "none",
        "allocator": "caching",
        "off": ["raw"],
        "on": [f"run {factor}"],
        "kind": "modelled",
        "ratios": [{"figure": f, "unit": u, **numbers} for f, u in units.items()],
        "traffic": numbers,
        "decomposition": rows,
        **about,
    }


def document(*pairs):
    return {"pairs": list(pairs)}


SWEEP = document(
    pair(0.8, off=40.0, on=0.0, ratio=0.0, low=0.0, high=0.0),
    pair(2.0, off=50.0, on=100.0, ratio=2.0, low=1.5, high=2.5),
)


def leaves(spec):
    """All single views of a chart."""
    if isinstance(spec, dict):
        if "mark" in spec:
            yield spec
        for value in spec.values():
            yield from leaves(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from leaves(value)


def marks(chart, kind):
    spec = chart.to_dict()
    found = [leaf for leaf in leaves(spec) if leaf["mark"]["type"] == kind]
    return found, spec["datasets"]


def text_of(chart):
    return rendered(chart, ".svg").decode()


# Frames ---------------------------------------------------------------------------------------------


def test_effects_hold_each_figure_of_each_pair_and_traffic_is_both_ways_together():
    frame = effects(SWEEP)
    assert frame.schema == EFFECTS
    assert frame.select("factor", "figure").rows() == [
        (factor, figure)
        for factor in (0.8, 2.0)
        for figure in ("fault_rows", "first_touches", "traffic", "step_ns")
    ]
    assert frame.filter(figure="traffic")["unit"].to_list() == ["byte", "byte"]
    assert frame["run"].unique().sort().to_list() == ["run 0.8", "run 2.0"]


def test_the_account_of_traffic_adds_both_ways_and_an_unknown_part_stays_unknown():
    frame = account(SWEEP)
    assert frame.schema == ACCOUNT
    traffic = frame.filter(figure="traffic", factor=0.8).select("part", "value", "error").rows()
    assert traffic == [
        ("reuse", -8, 2),
        ("dead", 24, 2),
        ("packing", None, 2),
        ("remainder", 4, 2),
    ]
    assert "first_touches" not in frame["figure"].to_list()


def test_what_adds_stands_above_0_and_what_saves_below_each_on_the_one_before():
    frame = account(SWEEP).filter(figure="traffic", factor=0.8)
    assert frame.select("part", "low", "high", "difference").rows() == [
        ("reuse", -8, 0, 20),
        ("dead", 0, 24, 20),
        ("packing", None, None, 20),
        ("remainder", 24, 28, 20),
    ]


# Charts ---------------------------------------------------------------------------------------------


def test_the_effect_has_both_sides_and_a_ratio_with_its_interval_for_each_figure():
    chart = pca_effect(effects(SWEEP))
    points, data = marks(chart, "point")
    assert len(points) == 2 * 4
    ratios = [p for p in points if p["encoding"]["y"]["field"] == "ratio"]
    for each in ratios:
        assert [row["ratio"] for row in data[each["data"]["name"]]] == [0.0, 2.0]
        assert each["mark"]["color"] == accent("light", 1)
    intervals = [r for r in marks(chart, "rule")[0] if "y2" in r["encoding"]]
    assert len(intervals) == 4
    assert {r["encoding"]["y2"]["field"] for r in intervals} == {"ratio_high"}
    dashed = [r for r in marks(chart, "rule")[0] if "strokeDash" in r["mark"]]
    assert [data[r["data"]["name"]] for r in dashed] == [[{"one": 1.0}]] * 4


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_two_sides_have_the_two_accents_of_the_palette(theme):
    points, _ = marks(pca_effect(effects(SWEEP), theme=theme), "point")
    (scale,) = {
        tuple(p["encoding"]["color"]["scale"]["range"]) for p in points if "color" in p["encoding"]
    }
    assert scale == (accent(theme), accent(theme, 1))
    assert accent(theme) in text_of(pca_effect(effects(SWEEP), theme=theme))


def test_all_panels_end_at_the_same_factors_also_where_there_is_no_ratio():
    none = document(pair(0.8, off=0.0, on=0.0), SWEEP["pairs"][1])
    chart = pca_effect(effects(none))
    domains = {
        tuple(leaf["encoding"]["x"]["scale"]["domain"])
        for leaf in leaves(chart.to_dict())
        if "x" in leaf["encoding"]
    }
    assert domains == {(0.8, 2.0)}
    assert "No ratio where a figure is 0" in text_of(chart)
    assert "No ratio" not in text_of(pca_effect(effects(SWEEP)))


def test_the_account_stacks_the_parts_in_their_colours_and_marks_their_sum():
    chart = pca_account(account(SWEEP))
    bars, data = marks(chart, "bar")
    assert len(bars) == 3
    scale = bars[0]["encoding"]["color"]["scale"]
    assert scale["range"] == [shade.light for _, shade in PARTS.values()]
    assert scale["range"][scale["domain"].index("dead traffic")] == CAUSES["eviction"].light
    rows = data[bars[0]["data"]["name"]]
    assert [(r["part"], r["value"]) for r in rows if r["place"] == "2"] == [
        ("reuse", -4),
        ("dead traffic", 12),
        ("other", 2),
    ]
    ticks, _ = marks(chart, "tick")
    assert [row["difference"] for row in data[ticks[0]["data"]["name"]]] == [10, 10]
    assert "What is unknown is in other." in text_of(chart)


def test_without_a_pair_each_chart_says_so():
    for chart in (pca_effect(effects(document())), pca_account(account(document()))):
        assert "There is nothing to draw" in text_of(chart)


def test_runs_without_a_factor_stand_beside_each_other_by_name_and_a_name_is_only_text():
    one = pair(None, off=4.0, on=2.0, ratio=0.5, network=None, hint=None, kind="derived")
    frame = effects(document({**one, "on": [HOSTILE]}))
    for chart in (pca_effect(frame), pca_account(account(document({**one, "on": [HOSTILE]})))):
        text = text_of(chart)
        assert "derived from recorded rows" in text
        assert "modelled" not in text
        assert "<img" not in text
    assert "One warm step has no interval." in text_of(pca_effect(frame))


def test_of_several_networks_the_first_is_drawn_and_the_others_are_told():
    two = document(*SWEEP["pairs"], pair(1.0, off=1.0, on=3.0, ratio=3.0, network="other"))
    chart = pca_effect(effects(two))
    assert "The first of 2 conditions" in text_of(chart)
    _, data = marks(chart, "point")
    drawn = [row.get("network") for rows in data.values() for row in rows]
    assert "net" in drawn
    assert "other" not in drawn


def test_one_pair_is_a_point_and_a_hint_and_switches_are_named():
    one = pair(1.5, off=4.0, on=2.0, ratio=0.5, low=0.4, high=0.6, hint="prefetch")
    text = text_of(pca_effect(effects(document({**one, "allocator": "caching:drop"}))))
    assert "net, prefetch, caching:drop, modelled" in text
    assert "NaN" not in text


def test_pairs_cannot_be_made_of_nothing():
    with pytest.raises(UsageError, match="Name runs to compare"):
        find_pairs()


# Two traces -----------------------------------------------------------------------------------------


def moved(*rows, stretch=100):
    """Rows of a stretch, direction, cause and MiB."""
    schema = {
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
        "direction": DIRECTION,
        "cause": CAUSE,
        "n_migrations": pl.Int64,
        "bytes": pl.Int64,
        "before_bytes": pl.Int64,
        "n_gpus": pl.Int64,
        "n_far": pl.Int64,
    }
    full = [(at, at + stretch, way, cause, 1, n * MIB, 0, 1, 0) for at, way, cause, n in rows]
    return pl.DataFrame(full, schema=schema, orient="row")


def test_two_traces_start_at_0_and_share_both_scales_and_the_colours():
    a = moved((1000, "htod", "coherence", 4), (1200, "dtoh", "eviction", 2))
    b = moved((50, "htod", "user", 8))
    chart = migrations_of_two(a, b, names=("A", HOSTILE))
    spec = chart.to_dict()
    bars, data = marks(chart, "bar")
    assert [[row["start"] for row in data[bar["data"]["name"]]] for bar in bars] == [[0, 200], [0]]
    assert {tuple(bar["encoding"]["x"]["scale"]["domain"]) for bar in bars} == {(0, 300)}
    assert spec["resolve"]["scale"]["y"] == "shared"
    scales = [bar["encoding"]["color"]["scale"] for bar in bars]
    assert scales[0] == scales[1]
    known = {cause_word(cause): CAUSES[cause].light for cause in ("coherence", "eviction", "user")}
    assert dict(zip(scales[0]["domain"], scales[0]["range"], strict=True)) == known
    text = text_of(chart)
    assert "A: 6.00 MiB in 2 copies" in text
    assert "in stretches of 100 ns" in text
    assert "<img" not in text


def test_copies_between_gpus_are_left_out_and_said_and_nothing_at_all_says_so():
    a = moved((0, "htod", "user", 1), (0, "dtod", "user", 1))
    text = text_of(migrations_of_two(a, moved((0, "htod", "user", 1)), names=("A", "B")))
    assert "Copies between GPUs are left out." in text
    assert "A: 1.00 MiB in 1 copy" in text
    assert "Nothing moved" in text_of(migrations_of_two(moved(), moved(), names=("A", "B")))


def test_stretches_have_the_length_that_is_asked_for_whatever_the_number_of_bins(trace_of):
    copies = [x.migration(at, at + 10, 4096) for at in (0, 250, 1_000)]
    export = x.Export().add(x.MEMCPY, *copies)
    options = {"stretch_ns": 500, "n_bins": 1}
    found = nsan.analyse(trace_of(export), "causes_over_time", options=options).collect()
    assert found.select("start_ns", "end_ns", "n_migrations").rows() == [
        (0, 500, 2),
        (1_000, 1_500, 1),
    ]
