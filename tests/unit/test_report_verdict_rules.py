"""The rules of the verdict, each branch probed with figures made for it."""

from __future__ import annotations

import polars as pl
import pytest

from nsan.advising import Advised
from nsan.analysis.advisor.advice import Advice, Gain, Rows, Silent
from nsan.report.evidence import Bounce, Evidence, Held, Memory, Place
from nsan.report.judging import (
    grounds,
    verdict,
    what_it_cost,
    what_may_help,
    what_moved,
    why,
)
from nsan.report.trusting import trust, where

MIB = 1 << 20
ALL = dict.fromkeys(("gpu_faults", "cpu_faults", "migrations", "kernels"), "recorded")
UNKNOWN = "how long kernels waited is not known"
FAULTED = {("htod", "coherence"): 2 * MIB, ("htod", "prefetch"): 6 * MIB}


def evidence(**known):
    return Evidence(**{"answers": ALL, "moved": {}, "n_copies": 1, "n_fault_rows": 1} | known)


def held(exposed, time=1000, name="k", came=8 * MIB, kind="derived", n_rows=1):
    return Held(name, time, exposed, came, n_rows, kind)


def said(sentences):
    return [each.text for each in sentences if each.text]


def test_the_verdict_has_six_lines_whatever_is_known():
    nothing = verdict(Evidence(answers={}, advised=Advised((), ())))
    labels = [point.label for point in nothing.points]
    assert labels == [
        "What moved:",
        "What it cost:",
        "Why:",
        "Where:",
        "What may help:",
        "How far to trust it:",
    ]
    assert all(point.text for point in nothing.points)


def test_bytes_are_named_by_their_way_and_ways_without_any_are_left_out():
    moved = {("htod", "user"): MIB, ("htod", "prefetch"): MIB, ("dtod", "coherence"): 4 * MIB}
    got = what_moved(evidence(moved=moved, n_copies=3, n_gpus=2))
    assert said(got) == ["2.00 MiB went to the GPUs and 4.00 MiB moved between GPUs, in 3 copies"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("recorded", "Not known, for sizes of migrations could not be read"),
        ("not_recorded", "Not known, for migrations were not recorded"),
        ("unknown", "Not known, and the capture does not say whether migrations were recorded"),
    ],
)
def test_what_moved_without_sizes_is_not_known_and_never_zero(answer, words):
    got = what_moved(evidence(moved=None, answers=ALL | {"migrations": answer}))
    assert said(got) == [words]


def test_that_memory_came_again_is_said_from_one_tenth_on():
    once = what_moved(evidence(moved=FAULTED, times_in=1.09))
    again = what_moved(evidence(moved=FAULTED, times_in=1.1))
    assert len(once) == 1
    assert again[1][:2] == ("What the CPU sent went there 1.10 times on average", "derived")


def test_a_wait_from_fault_rows_is_the_most_that_a_kernel_can_have_stalled():
    (wait, _) = what_it_cost(evidence(held=held(250)))
    assert wait.kind == "derived"
    assert (
        "waiting for 250 ns (25.0%) of that: the most that page faults can have held up"
        in wait.text
    )


def test_a_wait_put_together_from_copies_is_no_bound_and_says_so():
    (wait, _) = what_it_cost(evidence(held=held(250, kind="reconstructed")))
    assert wait.kind == "reconstructed"
    assert "the most" not in wait.text
    assert "before the first copy of a batch does not show" in wait.text


def test_a_wait_on_coarse_times_is_rough_and_no_bound():
    (wait, _) = what_it_cost(evidence(held=held(250), checks={"times": "unknown"}))
    assert "the most" not in wait.text
    assert "rough" in wait.text


def test_waits_of_several_kernels_are_told_together_with_the_longest():
    known = {"held": held(900), "n_kernel_names": 2, "waiting_ns": 1200, "kernels_ns": 1500}
    (wait, _) = what_it_cost(evidence(**known))
    assert (
        "Kernels ran for 1.500 us, and a page fault was waiting for 1.200 us (80.0%)" in wait.text
    )
    assert "longest in `k` (900 ns)" in wait.text
    (mixed, _) = what_it_cost(evidence(**known, waiting_kind="reconstructed"))
    assert mixed.kind == "reconstructed"
    assert "the most" not in mixed.text


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"held": held(0)}, "No kernel waited for a page fault"),
        ({"n_kernels": 0}, f"No kernel was recorded, so {UNKNOWN}"),
        ({"n_kernels": 0, "is_part": True}, f"No kernel was recorded in this part, so {UNKNOWN}"),
        (
            {"n_kernels": 1},
            f"1 kernel was recorded, with times that could not be read, so {UNKNOWN}",
        ),
        (
            {"n_kernels": 2, "kernels_ns": 0},
            f"2 kernels were recorded, none with a duration, so {UNKNOWN}",
        ),
        (
            {"answers": ALL | {"kernels": "not_recorded"}},
            "How long kernels waited is not known, for kernels were not recorded",
        ),
        (
            {"held": held(0), "answers": ALL | {"gpu_faults": "not_recorded"}},
            "Nothing shows that a kernel waited for a page fault",
        ),
        (
            {"held": held(0), "answers": ALL | {"gpu_faults": "unknown"}, "moved": FAULTED},
            "Page faults were served while no kernel was seen to run",
        ),
    ],
)
def test_no_wait_is_claimed_only_where_fault_rows_would_show_one(known, words):
    assert said(what_it_cost(evidence(**known)))[0] == words


def test_evictions_come_first_with_what_was_fetched_again():
    memory = Memory(10 * MIB, 9 * MIB, factor=None, seen_factor=1.5)
    got = why(evidence(moved=FAULTED, memory=memory))
    assert got[0].text.startswith(
        "GPU memory was full: 10.00 MiB were evicted, and 9.00 MiB of that (90.0%)"
    )
    assert "at most 1.50 times" in got[0].text
    assert got[0].kind == "reconstructed"


def test_a_factor_from_the_size_of_the_gpu_is_no_upper_bound_but_derived():
    (first, *_) = why(evidence(memory=Memory(MIB, 0, factor=1.25, seen_factor=1.4)))
    assert "managed memory was 1.25 times what the GPU has room for" in first.text
    assert first.kind == "derived"


def test_evictions_of_a_part_say_nothing_of_refaults():
    (first, *_) = why(evidence(memory=Memory(MIB), is_part=True))
    assert first == ("GPU memory was full: 1.00 MiB were evicted", "recorded", ())


@pytest.mark.parametrize(
    ("moved", "whose"),
    [
        ({("htod", "coherence"): MIB}, "the CPU"),
        ({("dtod", "prefetch"): MIB}, "another GPU"),
        ({("htod", "prefetch"): MIB, ("dtod", "coherence"): MIB}, "the CPU or another GPU"),
    ],
)
def test_faulted_pages_are_said_to_come_from_where_they_came(moved, whose):
    assert f"touched pages that were with {whose};" in why(evidence(moved=moved))[0].text


def test_the_share_of_the_prefetcher_counts_both_ways_to_gpus():
    moved = {("htod", "coherence"): MIB, ("htod", "prefetch"): MIB, ("dtod", "prefetch"): 2 * MIB}
    assert "brought 75.0% of that" in why(evidence(moved=moved))[0].text


def test_prefetches_of_the_program_are_judged_by_all_of_them():
    moved = {("htod", "user"): MIB}
    good = said(why(evidence(moved=moved, prefetches={"in_time": 2})))
    bad = said(why(evidence(moved=moved, prefetches={"in_time": 2, "late": 1, "early": 1})))
    assert good[1] == "None of its 2 prefetches looks late or early"
    assert bad[1] == "Of its 4 prefetches 1 came late and 1 came too early"
    (_, one) = said(why(evidence(moved=moved, prefetches={"late": 1})))
    assert one == "Its prefetch came late"


def test_batches_are_told_where_no_cause_is_known():
    known = {"outcomes": {"data": 3, "first_touch": 7}, "moved": {("htod", "unknown"): MIB}}
    assert said(why(evidence(**known))) == [
        "Of 10 batches of GPU page faults 3 brought data and 7 copied nothing (first touch, or mapped "
        "remotely)"
    ]


@pytest.mark.parametrize(
    ("n", "words"), [(1, "The only batch"), (2, "Both batches"), (9, "All 9 batches")]
)
def test_all_batches_are_not_called_some_of_so_many(n, words):
    (found,) = why(evidence(outcomes={"first_touch": n}, outcomes_kind="derived"))
    assert found.text == (
        f"{words} of GPU page faults copied nothing (first touch, or mapped remotely)"
    )
    assert found.kind == "derived"


def test_a_few_first_touches_are_not_worth_a_word():
    few = evidence(moved=FAULTED, outcomes={"data": 91, "first_touch": 9})
    many = evidence(moved=FAULTED, outcomes={"data": 90, "first_touch": 10})
    assert len(why(few)) == 1
    assert len(why(many)) == 2


def test_at_most_three_reasons_are_given():
    moved = FAULTED | {("dtoh", "coherence"): MIB, ("htod", "user"): MIB}
    known = {"memory": Memory(MIB), "bounce": Bounce(MIB, MIB, 1, "CPU, GPU 0")}
    assert len(why(evidence(moved=moved, **known))) == 3


def advice(title, level="high", gain=None, analysis="batches"):
    rows = (Rows(analysis, pl.DataFrame()),)
    return Advice("r", title, "", (), rows, "", (), (), "", gain=gain, level=level)


def may_help(*found, silent=(), span_ns=0):
    return what_may_help(evidence(advised=Advised(found, silent), span_ns=span_ns))


def test_what_may_help_is_the_first_two_advices_with_what_they_save():
    gain = Gain(2_000_000, "derived", "how")
    got = may_help(
        advice("Do this", gain=gain), advice("And that"), advice("Or that"), span_ns=8_000_000
    )
    assert said(got) == ["Do this: at most 2.000 ms of 8.000 ms (25%)", "And that"]
    assert [each.kind for each in got] == ["derived", ""]
    assert got[0].on == ("batches",)


def test_what_asks_for_no_change_is_no_help():
    got = may_help(advice("Look at this", level="info"), silent=(Silent("r", "No."),))
    assert said(got) == ["Nothing that was recorded asks for a change"]


def test_nothing_to_change_is_not_all_where_something_was_not_recorded():
    got = may_help(silent=(Silent("r", "No."), Silent("s", "Not recorded.", is_known=False)))
    assert said(got)[0].endswith(", but not all that matters is known")


def test_where_nobody_asked_for_advice_no_line_is_written():
    assert what_may_help(evidence()) == []


def test_the_place_is_no_kernel_where_most_came_while_none_ran():
    known = evidence(held=held(900, came=MIB), alone_bytes=7 * MIB, moved=FAULTED)
    assert said(where(known)) == ["87.5% of what came to GPUs came while no kernel was seen to run"]


def test_a_guessed_allocation_is_reconstructed_and_not_called_an_allocation():
    place = Place("0x7f00", MIB, 2 * MIB, 4 * MIB, is_guessed=True)
    (found,) = where(evidence(allocation=place))
    assert found[:2] == ("Memory `0x7f00` (4.00 MiB): 50.0% of what moved", "reconstructed")


def test_a_range_with_a_small_share_is_not_named():
    assert said(where(evidence(range=Place("r", 9, 100)))) == [
        "Nothing moved, so there is no place to name"
    ]
    assert said(where(evidence(range=Place("r", 10, 100)))) == [
        "NVTX range `r`: 10.0% of what came to GPUs"
    ]
    launched = Place("r", 10, 100, is_by_launch=True)
    assert said(where(evidence(range=launched))) == [
        "Launched in NVTX range `r`: 10.0% of what came to GPUs"
    ]


def test_first_touches_have_a_place_though_nothing_came():
    known = evidence(held=held(900, came=0, n_rows=3), n_fault_rows=4)
    assert said(where(known)) == ["Kernel `k`: 75.0% of GPU fault rows"]
    every = evidence(held=held(900, came=0, n_rows=4), n_fault_rows=4)
    assert said(where(every)) == ["Kernel `k`: all GPU fault rows"]


def test_trust_names_what_weakens_the_figures():
    weak = evidence(
        answers=ALL | {"gpu_faults": "not_recorded"},
        checks={"lost_rows": "warn", "times": "unknown", "cells": "fail", "platform": "ok"},
        is_part=True,
        is_nvprof=True,
        moved={("htod", "unknown"): 1},
    )
    text = ". ".join(said(trust(weak)))
    for words in (
        "put together from copies",
        "Rows are missing, so sums are lower bounds",
        "Start times are coarse",
        "1 check of the capture failed",
        "does not mean that data is local",
        "a part of the capture",
        "nvprof does not print why",
    ):
        assert words in text
    assert "model" not in text


def test_a_modelled_line_says_so_once_and_recorded_ones_say_nothing():
    known = {
        "moved": FAULTED | {("htod", "user"): MIB},
        "held": held(900),
        "in_flight": "Migrations were in flight",
    }
    modelled = verdict(evidence(is_modelled=True, **known)).points
    real = verdict(evidence(**known)).points
    assert [point.kind for point in modelled[:3]] == ["modelled"] * 3
    assert not any("derived" in point.text for point in modelled)
    assert (real[0].kind, real[1].kind) == ("recorded", "derived")
    assert "of that (derived). The program itself asked for" in real[2].text


def test_sizes_that_cannot_be_read_leave_reason_and_place_unknown():
    unread = evidence(moved=None, n_copies=2)
    words = ["for sizes of migrations could not be read"]
    assert [text.partition(", ")[2] for text in said(why(unread))] == words
    assert [text.partition(", ")[2] for text in said(where(unread))] == words


def test_the_prefetcher_that_brought_nothing_has_no_percent():
    (came,) = said(why(evidence(moved={("htod", "coherence"): MIB})))
    assert came.endswith("the driver's prefetcher brought none of that")


def test_the_verdict_stands_on_what_its_sentences_tell():
    place, outcomes = Place("a", MIB, 2 * MIB, 4 * MIB), {"data": 99, "first_touch": 1}
    known = {"moved": FAULTED, "held": held(900), "outcomes": outcomes, "times_in": 1.0}
    assert grounds(evidence(**known)) == {"faults_by_kernel"}
    more = {"allocation": place, "times_in": 2.0, "outcomes": {"first_touch": 1}}
    assert grounds(evidence(**known | more)) == {
        *("amplification", "batch_latency", "faults_by_allocation", "faults_by_kernel")
    }


def test_hostile_names_stay_code():
    name = "k`</script>\x1b[31m" + "x" * 500
    line = verdict(evidence(held=held(900, name=name), moved=FAULTED)).points[1]
    assert line.text.count("`") == 2
    assert "\x1b" not in line.text
    assert len(line.text) < 300
