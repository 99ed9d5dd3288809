"""Colours can be told apart: by people with each kind of colour blindness, on both grounds.

Colour blindness is simulated with the matrices of G. M. Machado, M. M. Oliveira and L. A. F. Fernandes, "A
Physiologically-based Model for Simulation of Color Vision Deficiency", IEEE TVCG 15(6), 2009, severity 1.0,
which apply to linear RGB. Differences are distances in CIE Lab (CIE76, D65). Contrast is that of WCAG 2.
"""

from __future__ import annotations

import itertools
import re

import pytest

from nsan.charts.palette import ACCESSES, CAUSES
from nsan.charts.theme import ACCENTS, LOOKS
from nsan.charts.transfers import weakest_cell
from nsan.schema import ACCESS, CAUSE

SIMULATED = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}

LEAST_DIFFERENCE = 18.0
"""In CIE Lab; about 2.3 is just noticed side by side."""

LEAST_CONTRAST = 3.0
"""Of a filled area to its ground (WCAG 2, 1.4.11); text has 4.5."""


def linear(colour):
    """Linear RGB, 0 to 1, of #rrggbb."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def seen(colour, vision):
    rgb = linear(colour)
    mixed = [sum(m * v for m, v in zip(row, rgb, strict=True)) for row in SIMULATED[vision]]
    return [min(max(v, 0.0), 1.0) for v in mixed]


def lab(rgb):
    """CIE Lab, D65, of linear RGB."""
    to_xyz = (
        (0.4124564, 0.3575761, 0.1804375),
        (0.2126729, 0.7151522, 0.0721750),
        (0.0193339, 0.1191920, 0.9503041),
    )
    white = (0.95047, 1.0, 1.08883)
    xyz = [sum(m * v for m, v in zip(row, rgb, strict=True)) for row in to_xyz]
    x, y, z = (
        t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29
        for t in (v / w for v, w in zip(xyz, white, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one, other, vision):
    pairs = zip(lab(seen(one, vision)), lab(seen(other, vision)), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) ** 0.5


def contrast(one, other):
    bright = sorted(
        sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True))
        for c in (one, other)
    )
    return (bright[1] + 0.05) / (bright[0] + 0.05)


def test_the_arithmetic_of_colours_is_right():
    assert lab(linear("#ffffff")) == pytest.approx((100, 0, 0), abs=0.01)
    # The Lab values of pure red are in every table of sRGB.
    assert lab(linear("#ff0000")) == pytest.approx((53.24, 80.09, 67.20), abs=0.02)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    # Red and a dark yellow fall together for who sees no green, and not for who sees tritan colours.
    assert (
        difference("#a05000", "#7a6a00", "deuteranopia")
        < 15
        < difference("#a05000", "#7a6a00", "normal")
    )


@pytest.mark.parametrize("vision", SIMULATED)
@pytest.mark.parametrize("theme", LOOKS)
@pytest.mark.parametrize("shades", [CAUSES, ACCESSES], ids=["causes", "accesses"])
def test_any_two_can_be_told_apart_by_anyone(shades, theme, vision):
    pairs = itertools.combinations(shades.items(), 2)
    differences = {
        (one, other): difference(a.on(theme), b.on(theme), vision) for (one, a), (other, b) in pairs
    }
    closest = min(differences, key=differences.get)
    assert differences[closest] >= LEAST_DIFFERENCE, (closest, differences[closest])


@pytest.mark.parametrize("theme", LOOKS)
def test_every_colour_stands_out_from_its_ground(theme):
    ground = LOOKS[theme].ground
    for name, shade in {**CAUSES, **ACCESSES}.items():
        assert contrast(shade.on(theme), ground) >= LEAST_CONTRAST, name
    assert contrast(weakest_cell(theme), ground) >= LEAST_CONTRAST
    for shade in ACCENTS:
        assert contrast(shade.on(theme), ground) >= 4.5
    for text in (LOOKS[theme].text, LOOKS[theme].muted):
        assert contrast(text, ground) >= 4.5


def test_every_cause_and_access_that_a_trace_can_have_has_a_colour():
    assert set(CAUSES) == set(CAUSE.categories)
    assert set(ACCESSES) == set(ACCESS.categories)
    for shade in (*CAUSES.values(), *ACCESSES.values()):
        assert re.fullmatch("#[0-9a-f]{6}", shade.light)
        assert re.fullmatch("#[0-9a-f]{6}", shade.dark)
