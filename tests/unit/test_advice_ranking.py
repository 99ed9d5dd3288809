"""What comes first among advices, and what another one makes moot."""

from __future__ import annotations

import pytest

from nsan.analysis.advisor.advice import Advice, Gain, Target
from nsan.analysis.advisor.ranking import level_of, ranked
from nsan.analysis.advisor.rules import RULES, Rule

X, Y = Target("x", 0, 4096, 0x1000), Target("y", 1, 4096, 0x2000)


def advice(rule, ns=None, *targets, level=None):
    gain = None if ns is None else Gain(ns, "derived", "how")
    return Advice(rule, rule, "", (), (), "", (), targets, "", gain=gain, level=level)


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
