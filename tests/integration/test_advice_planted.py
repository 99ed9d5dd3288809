"""Advice graded on programs of which the driver model knows what is wrong, and what the remedy saves."""

from __future__ import annotations

import pytest
from planting import address_of, gained_ns, written
from plants import CLEAN, PLANTS

import nsan
from nsan.analysis.advisor.rules import RULES

pytest.importorskip("numba")

MOST = 3
"""A bound may be so many times what the remedy saves."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Write the trace of each program, and ask for advice, once."""
    folder, known = tmp_path_factory.mktemp("plants"), {}

    def ask(planted):
        if planted.name not in known:
            path = written(planted, folder)
            known[planted.name] = (path, nsan.advise(path))
        return known[planted.name]

    return ask


def test_every_rule_has_a_program_with_its_problem():
    assert {plant.rule for plant in PLANTS.values()} == {rule.name for rule in RULES}
    assert len(PLANTS) >= 12
    assert len(CLEAN) >= 6


@pytest.mark.parametrize("plant", PLANTS.values(), ids=lambda plant: plant.name)
def test_the_planted_problem_comes_first_and_is_bounded(plant, asked):
    path, found = asked(plant)
    first = found.advice[0]
    assert first.rule == plant.rule
    assert first.level != "info"
    if plant.allocation:
        assert first.target.va == address_of(plant, path)
    if plant.remedied is not None:
        saved = gained_ns(plant)
        assert saved > 0
        assert first.gain.kind in {"derived", "reconstructed", "modelled"}
        assert saved <= first.gain.ns <= MOST * saved


@pytest.mark.parametrize("plant", PLANTS.values(), ids=lambda plant: plant.name)
def test_advice_has_what_one_needs_to_act_on_it(plant, asked):
    for advice in asked(plant)[1].advice:
        assert advice.title
        assert advice.finding
        assert advice.check
        assert advice.numbers
        assert advice.rows
        assert advice.calls


@pytest.mark.parametrize("clean", CLEAN.values(), ids=lambda clean: clean.name)
def test_a_clean_program_gets_nothing_to_do_and_every_reason(clean, asked):
    _, found = asked(clean)
    assert [each.rule for each in found.advice if each.level != "info"] == []
    said = {each.rule for each in (*found.silent, *found.advice)}
    assert said == {rule.name for rule in RULES}
    assert all(each.reason.endswith(".") for each in found.silent)
