"""What comes first among advices, and what another one makes moot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exports import (
    CPU_FAULTS,
    DTOH,
    GPU_FAULTS,
    KERNEL,
    KIB,
    MEMCPY,
    MEMORY,
    MIB,
    PREFETCH,
    VA,
    WRITE,
    Export,
    cpu_fault,
    gpu_fault,
    kernel,
    memory_event,
    migration,
)

import nsan
from nsan.analysis.advisor.advice import Advice, Gain, Target
from nsan.analysis.advisor.ranking import level_of, named, ranked
from nsan.analysis.advisor.rules import RULES, Rule

X, Y = Target("x", 0, 4096, 0x1000), Target("y", 1, 4096, 0x2000)


def advice(rule, ns=None, *targets, level=None, conditional=False):
    gain = None if ns is None else Gain(ns, "derived", "how")
    return Advice(
        rule, rule, "", (), (), "", (), targets, "",
        gain=gain, level=level, is_conditional=conditional,
    )  # fmt: skip


def rule(name, *yields_to):
    return Rule(name, "?", iter, yields_to)


def order(found, rules=(), span_ns=1000):
    return [each.rule for each in ranked(found, rules, span_ns)]


@pytest.mark.parametrize(
    ("ns", "level"), [(100, "high"), (99, "medium"), (30, "medium"), (29, "low"), (9, "info")]
)
def test_the_level_follows_from_the_share_of_the_run_that_is_gained(ns, level):
    assert level_of(advice("a", ns), 1000) == level


def test_a_gain_of_a_run_of_unknown_length_has_no_share():
    assert level_of(advice("a", 100), 0) == "info"


def test_a_stated_level_stands_whatever_the_gain():
    assert level_of(advice("a", 999, level="low"), 1000) == "low"


def test_the_higher_level_and_then_the_larger_gain_come_first():
    found = [advice("a", 40), advice("b", 300), advice("c", 400), advice("d", level="high")]
    assert order(found) == ["c", "b", "d", "a"]


def test_lost_rows_come_before_all_since_they_make_figures_doubtful():
    assert order([advice("a", 900), advice("lost_rows", level="medium")]) == ["lost_rows", "a"]


def test_advice_yields_to_another_for_the_same_memory():
    rules = (rule("a", "b"), rule("b"))
    assert order([advice("a", 900, X), advice("b", 100, X)], rules) == ["b"]
    assert order([advice("a", 900, X), advice("b", 100, Y)], rules) == ["a", "b"]


def test_advice_for_several_yields_only_where_all_of_them_are_taken():
    rules = (rule("a", "b"), rule("b"))
    assert order([advice("a", 900, X, Y), advice("b", 100, X)], rules) == ["a", "b"]
    taken = [advice("a", 900, X, Y), advice("b", 100, X), advice("b", 50, Y)]
    assert order(taken, rules) == ["b", "b"]


def test_two_processes_use_the_same_addresses_for_different_memory():
    rules = (rule("a", "b"), rule("b"))
    one, two = (replace(X, allocation="", pid=pid) for pid in (1, 2))
    assert order([advice("a", 900, two), advice("b", 100, one)], rules) == ["a", "b"]
    assert order([advice("a", 900, one), advice("b", 100, one)], rules) == ["b"]


def test_a_title_says_which_process_where_there_are_several():
    found = advice("a", 900, replace(X, pid=7))
    assert named(found, 1).title == "a"
    assert named(found, 2).title == "a (process 7)"
    assert named(advice("a", 900), 2).title == "a"


def test_what_helps_only_under_a_condition_is_never_high_and_comes_after_its_level():
    assert level_of(advice("a", 900, conditional=True), 1000) == "medium"
    assert level_of(advice("a", 20, conditional=True), 1000) == "low"
    found = [advice("a", 900, conditional=True), advice("b", 40), advice("c", 20)]
    assert order(found) == ["b", "a", "c"]


def test_nothing_yields_to_what_helps_only_under_a_condition():
    found = [advice("a", 900, X), advice("b", 990, X, conditional=True)]
    assert order(found, (rule("a", "b"), rule("b"))) == ["a", "b"]


def test_nothing_yields_to_what_is_only_good_to_know():
    assert order([advice("a", 900, X), advice("b", 1, X)], (rule("a", "b"), rule("b"))) == [
        "a",
        "b",
    ]


def test_rules_have_names_of_their_own_and_yield_to_rules_that_are_there():
    names = [each.name for each in RULES]
    assert len(set(names)) == len(names)
    assert {name for each in RULES for name in each.yields_to} <= set(names)
    assert all(each.question.endswith("?") for each in RULES)


def test_memory_that_bounces_in_one_process_hides_no_wait_of_another_at_the_same_address(built):
    export = Export()
    for i in range(30):
        start = 1_000_000 + i * 200_000
        export.add(GPU_FAULTS, gpu_fault(start, start + 60_000, access=WRITE, pid=1))
        export.add(CPU_FAULTS, cpu_fault(start + 100_000, pid=1))
        export.add(
            MEMCPY,
            migration(start + 20_000, start + 60_000, 64 * KIB, pid=1),
            migration(start + 120_000, start + 150_000, 64 * KIB, kind=DTOH, pid=1),
        )
    for i in range(16):
        start, va = 1_000_000 + i * 300_000, VA + i * 2 * MIB
        export.add(GPU_FAULTS, gpu_fault(start, start + 260_000, va, pid=2))
        export.add(
            MEMCPY,
            migration(start + 20_000, start + 60_000, 64 * KIB, va, pid=2),
            migration(
                start + 60_000, start + 80_000, 2 * MIB - 64 * KIB, va + 64 * KIB,
                cause=PREFETCH, pid=2,
            ),
        )  # fmt: skip
    for pid in (1, 2):
        export.add(KERNEL, kernel(900_000, 8_000_000, pid=pid))
        export.add(MEMORY, memory_event(100_000, VA, 32 * MIB, pid=pid))
    found = nsan.advise(built(export)).advice
    told = {(each.rule, each.target.pid) for each in found if each.level == "high"}
    assert told == {("ping_pong", 1), ("prefetch_before_use", 2)}
    assert all(each.title.endswith(f"(process {each.target.pid})") for each in found)
