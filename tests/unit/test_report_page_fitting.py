"""However many marks its charts have, a page stays small; what gives way is in a fixed order."""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib

import pytest

pytest.importorskip("nbconvert", reason="pip install 'nsan[report]'")

import report_pages as made

from nsan.report import fitting
from nsan.report.fitting import fitted, minified
from nsan.report.page import MOST_BYTES, page_of


@pytest.fixture(scope="module")
def small():
    return made.picture()


@pytest.fixture(scope="module")
def large():
    return made.scattered(800)


def kinds(forms):
    return [re.match(r"data:image/([a-z]+)", form.image)[1] for form in forms]


def test_with_room_every_chart_is_live_and_has_its_picture(small, large):
    forms = fitted([small, large], 10_000_000)
    assert kinds(forms) == ["svg", "svg"]
    for form, picture in zip(forms, [small, large], strict=True):
        assert json.loads(zlib.decompress(base64.b64decode(form.spec))) == picture.spec
        assert base64.b64decode(form.image.partition(",")[2]).decode() == minified(picture.svg)


def test_the_largest_picture_becomes_pixels_before_any_chart_loses_its_life(small, large):
    room = sum(form.n_bytes for form in fitted([small, large], 10_000_000)) - 1
    forms = fitted([small, large], room)
    assert kinds(forms) == ["svg", "jpeg"]
    assert all(form.is_live for form in forms)
    assert sum(form.n_bytes for form in forms) <= room


def test_where_pixels_do_not_help_enough_the_largest_chart_is_a_picture_only(small, large):
    whole = fitted([small, large], 10_000_000)
    still = fitting._to_picture(fitting._to_few_pixels(whole[1]))
    forms = fitted([small, large], whole[0].n_bytes + still.n_bytes)
    assert [form.is_live for form in forms] == [True, False]
    assert forms[1] == still


def test_no_chart_is_dropped_when_there_is_no_room_at_all(small, large):
    forms = fitted([small, large, small], 0)
    assert [form.picture.name for form in forms] == ["bars", "scattered", "bars"]
    assert not any(form.is_live for form in forms)


def test_a_page_without_a_script_has_no_data_of_charts(small):
    assert not fitted([small], 10_000_000, live=False)[0].is_live


def test_fourteen_charts_of_five_thousand_rows_fit_into_a_page(monkeypatch):
    for function in (fitting.jpeg_of, fitting.minified, fitting.packed):
        monkeypatch.setattr(fitting, function.__name__, functools.cache(function))
    chart = made.scattered(5000)
    assert 14 * len(chart.svg) > 6 * MOST_BYTES
    page = page_of(made.executed("# A", *[made.shows(chart) for _ in range(14)]), title="x")
    assert len(page.encode()) < MOST_BYTES
    assert page.count("<figure") == 14
    n_pictures = page.count("A picture only: with its data")
    held = json.loads(page.partition('<script type="application/json">')[2].partition("<")[0])
    assert len(held["specs"]) + n_pictures == 14
    # It is not thrown away for little: more than half of what is allowed is used.
    assert len(held["specs"]) >= 7


@pytest.mark.parametrize(
    ("drawn", "least"),
    [
        (
            '<text x="1.23456">1.23456 aria-label="a"</text>',
            '<text x="1.23">1.23456 aria-label="a"</text>',
        ),
        ('<path d="M0.9999,-0.0001h12.5" role="x"/>', '<path d="M1,-0h12.5"/>'),
        ('<path aria-label="a > &quot;b" d="M1.2345e-7,1"/>', '<path d="M1.2345e-7,1"/>'),
        (
            '<path fill="#b14400" fill-opacity="0.12345"/>',
            '<path fill="#b14400" fill-opacity="0.12345"/>',
        ),
        ('<line x2="100.500"/>', '<line x2="100.5"/>'),
    ],
)
def test_only_what_nobody_sees_is_left_out_of_a_picture(drawn, least):
    assert minified(drawn) == least


def test_a_small_picture_says_the_same_words(large):
    words = re.compile(r"<text[^>]*>([^<]*)</text>")
    least = minified(large.svg)
    assert words.findall(least) == words.findall(large.svg)
    assert "aria-" not in least
    assert len(least) < 0.7 * len(large.svg)
