from __future__ import annotations

import contextlib

import pytest

from nsan.errors import BadTimeError
from nsan.units import (
    counted,
    format_address,
    format_bytes,
    format_count,
    format_rate,
    format_time,
    parse_time,
    parse_window,
)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0", 0),
        ("1200", 1200),
        ("1200ns", 1200),
        ("40us", 40_000),
        ("40usec", 40_000),
        ("40\u00b5s", 40_000),
        ("250ms", 250_000_000),
        ("1s", 1_000_000_000),
        ("1s250ms", 1_250_000_000),
        ("250ms1s", 1_250_000_000),
        ("1.5s", 1_500_000_000),
        ("0.1s", 100_000_000),
        ("0.000000001s", 1),
        ("0.0000000004s", 0),
        ("2m", 120_000_000_000),
        ("1h2min3sec", 3_723_000_000_000),
        ("1S250MS", 1_250_000_000),
        ("  10ms ", 10_000_000),
        ("-12", -12),
        ("-1s250ms", -1_250_000_000),
    ],
)
def test_a_time_is_read_as_people_write_it(text, ns):
    assert parse_time(text) == ns


def test_a_time_of_many_digits_keeps_every_nanosecond():
    assert parse_time("9007199254.740993s") == 9_007_199_254_740_993_000
    assert parse_time("9223372036.854775807s") == (1 << 63) - 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "-",
        "--5",
        "+5",
        "s",
        "ms",
        "1x",
        "1 s",
        "1s 250ms",
        "1s-2ms",
        "1,5s",
        "1.s",
        ".5s",
        "1e3",
        "0x10",
        "nan",
        "inf",
        "1s/2s",
        "one second",
    ],
)
def test_what_is_not_a_time_is_refused_by_its_text(text):
    with pytest.raises(BadTimeError) as caught:
        parse_time(text)
    assert caught.value.text == text
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["9" * 5000, "0." + "1" * 400 + "s"], ids=["whole", "fraction"])
def test_a_time_of_absurd_length_is_a_bad_time_or_a_number_but_no_crash(text):
    with contextlib.suppress(BadTimeError):
        assert isinstance(parse_time(text), int)


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("10ms/1s", (10_000_000, 1_000_000_000)),
        ("/40us", (None, 40_000)),
        ("2s/", (2_000_000_000, None)),
        ("/", (None, None)),
        ("5/5", (5, 5)),
        ("-5/5", (-5, 5)),
        (" 1s / 2s ", (1_000_000_000, 2_000_000_000)),
    ],
)
def test_a_window_is_two_times_and_an_empty_side_is_open(text, window):
    assert parse_window(text) == window


@pytest.mark.parametrize("text", ["", "1s", "2s/1s", "5/4", "1/2/3", "a/b", "1s/x", "1s-2s", "//"])
def test_what_is_not_a_window_is_refused(text):
    with pytest.raises(BadTimeError):
        parse_window(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "-"),
        (0, "0 ns"),
        (1, "1 ns"),
        (999, "999 ns"),
        (1_000, "1.000 us"),
        (999_999, "999.999 us"),
        (1_000_000, "1.000 ms"),
        (999_999_000, "999.999 ms"),
        (1_000_000_000, "1.000 s"),
        (3_600_000_000_000, "3600.000 s"),
        (-1_500, "-1.500 us"),
    ],
)
def test_a_time_is_written_with_the_unit_that_fits(ns, text):
    assert format_time(ns) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        ((1 << 20) - 1024, "1023.00 KiB"),
        (1 << 20, "1.00 MiB"),
        (1 << 30, "1.00 GiB"),
        (1 << 40, "1.00 TiB"),
        (-4096, "-4.00 KiB"),
    ],
)
def test_a_size_is_written_with_a_binary_unit(n, text):
    assert format_bytes(n) == text


def test_a_value_just_below_a_unit_is_not_written_as_a_thousand_of_the_smaller_one():
    assert format_time(999_999_999) == "1.000 s"
    assert format_bytes((1 << 20) - 1) == "1.00 MiB"


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, "-"),
        (0.0, "0 B/s"),
        (409.6, "410 B/s"),
        (4096 / 405_544 * 1e9, "10.10 MB/s"),
        (999.99e6, "999.99 MB/s"),
        (1e9, "1.00 GB/s"),
        (40e9, "40.00 GB/s"),
    ],
)
def test_a_rate_is_written_with_a_decimal_unit(rate, text):
    assert format_rate(rate) == text


def test_a_slow_rate_is_not_written_as_none_at_all():
    assert not format_rate(409.6).startswith("0.00")


@pytest.mark.parametrize(
    ("n", "text"),
    [(None, "-"), (0, "0"), (999, "999"), (1000, "1 000"), (3_202_621, "3 202 621")],
)
def test_a_count_is_grouped_by_thousands(n, text):
    assert format_count(n) == text


def test_a_counted_noun_is_singular_only_for_one():
    assert [counted(n, "kernel") for n in (0, 1, 2)] == ["0 kernels", "1 kernel", "2 kernels"]
    assert counted(2, "launch", "launches") == "2 launches"


@pytest.mark.parametrize(
    ("va", "text"),
    [
        (None, None),
        (0, "0x0000000000000000"),
        (0x7FB4C4000000, "0x00007fb4c4000000"),
        (-140_737_488_355_328, "0xffff800000000000"),
        ((1 << 64) - 1, "0xffffffffffffffff"),
        (0xFFFF_8000_0000_0001, "0xffff800000000001"),
    ],
)
def test_an_address_is_sixteen_hexadecimal_digits_without_a_sign(va, text):
    assert format_address(va) == text
