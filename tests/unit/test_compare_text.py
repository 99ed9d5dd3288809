"""What is said of a comparison: of which time, and of which places of a figure."""

from __future__ import annotations

from nsan.comparing.text import headline, remarks, text_of


def row(figure, base, other, verdict="unjudged", place="", **about):
    scope = figure.partition(".")[0]
    known = base is not None and other is not None
    return {
        "condition": "B",
        "scope": scope if scope in {"step", "range", "kernel"} else "run",
        "figure": figure,
        "place": place,
        "unit": "ns",
        "kind": "recorded",
        "n_base": 1,
        "n_other": 1,
        "base": base,
        "other": other,
        "difference": other - base if known else None,
        "change": other / base - 1 if known and base else None,
        "change_low": None,
        "change_high": None,
        "noise": "none",
        "verdict": verdict if known else "unknown",
        "reason": "One run each.",
    } | about


def document(*rows):
    runs = [{"name": "x", "gpus": [], "n_steps": None, "kind": "recorded"}]
    return {
        "conditions": [{"label": each, "name": each, "runs": runs} for each in "AB"],
        "options": {"confidence": 0.95, "min_effect": 0.02, "most_places": 50},
        "places": {},
        "comparable": [],
        "differs": [],
        "movers": list(rows),
        "record": {},
        "gates": [],
    }


def test_a_step_that_got_longer_does_not_hide_that_the_run_got_shorter():
    step, run = row("step.time_ns", 29_000.0, 33_000.0), row("duration_ns", 6e6, 4e6)
    said = headline(document(run, step), "B")
    assert "A warm step takes 33.000 us in B, 29.000 us in A: +13.8 %." in said
    assert "The run takes 4.000 ms in B, 6.000 ms in A: -33.3 %." in said
    assert headline(document(run), "B").startswith("The run takes")
    assert headline(document(row("duration_ns", None, 4e6)), "B").startswith("Of 1 figure")


def test_a_figure_that_moved_in_one_place_is_not_plainly_unchanged():
    rows = [
        row("range.time_ns", 1e6, 1.8e6, place="fwd"),
        row("range.time_ns", 1e6, 1e6, place="bwd"),
        row("range.n", 3.0, 3.0, place="fwd"),
        row("range.n", 3.0, 3.0, place="bwd"),
        row("range.in_bytes", 0.0, 0.0, place="fwd"),
        row("range.in_bytes", 5.0, 5.0, place="bwd"),
    ]
    said = [*remarks(document(*rows), "B")]
    assert "Unchanged: range.time_ns (1 of 2), range.n, range.in_bytes (1 of 2)." in said
    assert "0 in both: range.in_bytes (1 of 2)." in said


def test_a_figure_that_is_not_known_of_one_place_is_told_so():
    rows = [
        row("kernel.time_ns", None, 1e6, place="add"),
        row("kernel.time_ns", 1e6, 2e6, place="mul"),
    ]
    assert any(
        each.startswith("Not known: kernel.time_ns (1 of 2).")
        for each in remarks(document(*rows), "B")
    )


def test_programs_are_the_same_only_in_what_is_looked_at():
    said = text_of(document(row("duration_ns", 1e6, 1e6)))
    assert "the same calls, kernels, NVTX ranges and allocations, as far as is recorded" in said
