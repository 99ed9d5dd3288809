"""Axes, sizes, footprint arithmetic, JSON and the machine's facts: the host core, without a GPU."""

from __future__ import annotations

import json
import re

import cpp
import pytest

MIB = 2**20
GIB = 2**30


@pytest.fixture(scope="module")
def core():
    return cpp.built("test_core", ["test_core.cpp"])


@pytest.fixture
def values(core):
    """Parse values, one a line, and give what each came to."""
    return lambda *lines: cpp.run(core, "values", stdin="\n".join(lines)).stdout.splitlines()


@pytest.fixture
def axes(core):
    """Parse a command line; the axes, or the exit status and the one line that says why not."""

    def parse(*flags):
        done = cpp.run(core, "axes", *flags)
        if done.returncode == 0:
            return json.loads(done.stdout)
        assert done.stdout == ""
        return done.returncode, done.stderr.rstrip("\n")

    return parse


@pytest.fixture
def plan(core):
    """Plan a footprint; its figures, or the reason why not."""

    def planned(managed, free, *, factor=0.0, allow=False, host=1 << 40, reserved=0):
        """Reserve as much as the tensors have, or more."""
        line = (
            f"{factor} {'yes' if allow else 'no'} {managed} {max(managed, reserved)} {free} {host}"
        )
        out = cpp.run(core, "footprint", stdin=line).stdout.strip()
        return json.loads(out) if out.startswith("{") else out

    return planned


def test_sizes_are_read_as_nsan_reads_them(values):
    sizes = {
        "4096": 4096,
        "64MiB": 64 * MIB,
        "64mb": 64 * MIB,
        "64M": 64 * MIB,
        "64 MiB": 64 * MIB,
        "1.5GiB": 3 * GIB // 2,
        "1B": 1,
        "0.5KiB": 512,
        "2T": 2 * 2**40,
        "1.000000001GiB": GIB + 1,
        "0.999999999TiB": 1_099_511_626_676,
    }
    assert values(*(f"size {text}" for text in sizes)) == [str(size) for size in sizes.values()]


def test_the_same_sizes_come_out_of_the_python_side(values):
    from nsan.units import parse_size

    texts = ["1.1KiB", "0.333333333GiB", "999.999999999TiB", "123456789012345", "7.25kb", "3g"]
    assert [int(size) for size in values(*(f"size {text}" for text in texts))] == [
        parse_size(text) for text in texts
    ]


NO_SIZES = ["", "0", "0.0MiB", "0.1B", "-1", "+1", "2e9", "0x10", "1.MiB", ".5MiB", "1,5MiB", "nan"]
NO_SIZES += ["inf", "64XiB", "64MiBs", "MiB", "1 2", "1..5", "1.0000000001GiB", "9" * 16]


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_refused(values, text):
    (answer,) = values(f"size {text}")
    assert answer.startswith(f"usage: --bytes: '{text}' is not a size such as 64MiB, 1.5GiB or")


def test_a_size_of_more_than_64_bits_is_refused(values):
    most, over = values("size 16777215TiB", "size 16777216TiB")
    assert most == str(16777215 * 2**40)
    assert over == "usage: --bytes: '16777216TiB' is more than 64 bits of bytes can say"


def test_sizes_are_written_with_the_largest_unit_that_says_them(values):
    sizes = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 10 * MIB: "10 MiB", GIB + 1: "1 GiB"}
    sizes |= {2**64 - 1: "16 EiB"}
    assert values(*(f"size_text {size}" for size in sizes)) == list(sizes.values())


def test_whole_numbers_are_digits_within_bounds(values):
    top = 2**64 - 1
    assert values(f"whole 0 {top} {top}", "whole 1 9 1") == [str(top), "1"]
    assert values(f"whole 0 {top} {top + 1}")[0].startswith(f"usage: --n: '{top + 1}' is not")
    for text in ["0", "10", "-3", "1.0", "1e0", "0x1", "nan", str(2**64), "1" * 40]:
        (answer,) = values(f"whole 1 9 {text}")
        assert answer == f"usage: --n: '{text}' is not a whole number from 1 to 9"


def test_decimal_numbers_have_no_exponent_and_no_sign(values):
    assert values("decimal 1.25", "decimal 2", "decimal 1000") == ["1.25", "2", "1000"]
    for text in ["0", "0.0", "1000.1", "-1", "nan", "inf", "1e2", "1.", ".5", "1.2.3", "1f"]:
        (answer,) = values(f"decimal {text}")
        assert answer == f"usage: --f: '{text}' is not a number above 0, at most 1000, as 1.25"


def test_a_near_miss_is_told_the_name_it_missed(values):
    near, swapped, far = values("choice pingpong", "choice sterde", "choice xyzzy")
    names = "is none of stream, stride, random, ping-pong"
    assert near == f"usage: --pattern: 'pingpong' {names}; did you mean ping-pong?"
    assert swapped.endswith("; did you mean stride?")
    assert far == f"usage: --pattern: 'xyzzy' {names}"


def test_without_flags_the_axes_have_their_defaults(axes):
    assert axes() == {
        "bytes": 64 * MIB,
        "oversubscription_factor": None,
        "prefetch": "none",
        "advice": "none",
        "allocator": "raw",
        "iterations": 7,  # the program's own default in place of the common one
        "seed": 1,
        "device": 0,
        "allow_oversubscription": False,
        "pattern": "stream",
        "layer_ranges": True,
        "dry_run": False,
        "out": "",
        "tape": "",
        "given": "",
    }


def test_flags_take_their_value_after_a_blank_or_an_equals_sign(axes):
    found = axes(
        *["--bytes=1.5GiB", "--oversubscription-factor", "1.25", "--prefetch=ahead"],
        *["--advice", "preferred-cpu", "--allocator", "caching", "--iterations", "2"],
        *["--seed", str(2**64 - 1), "--device", "3", "--allow-oversubscription", "--out", "a=b"],
        *["--pattern", "random", "--no-layer-ranges", "--dry-run", "--tape", "/home/alice/x.tape"],
    )
    assert found["given"] == (
        "--advice --allocator --allow-oversubscription --bytes --device --dry-run --iterations "
        "--layer-ranges --out --oversubscription-factor --pattern --prefetch --seed --tape"
    )
    del found["given"]
    assert found == {
        "bytes": 3 * GIB // 2,
        "oversubscription_factor": 1.25,
        "prefetch": "ahead",
        "advice": "preferred-cpu",
        "allocator": "caching",
        "iterations": 2,
        "seed": 2**64 - 1,
        "device": 3,
        "allow_oversubscription": True,
        "pattern": "random",
        "layer_ranges": False,
        "dry_run": True,
        "out": "a=b",
        "tape": "/home/alice/x.tape",
    }


def test_no_path_is_among_the_axes_that_a_table_gets(core):
    done = cpp.run(core, "axes", "--tape", "/home/alice/x.tape", "--out", "/home/alice/out")
    # Of the line, what the test program adds comes last; the axes before it hold neither.
    before = done.stdout.partition('"out"')[0]
    assert '"dry_run": false, ' in before
    assert "/home/alice" not in before


def test_of_a_repeated_flag_the_last_counts(axes):
    assert axes("--seed", "1", "--seed", "2", "--dry-run", "--dry-run=false")["seed"] == 2
    assert axes("--dry-run", "--dry-run=false")["dry_run"] is False


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--byte", "1"], "unknown flag '--byte'; did you mean --bytes?"),
        (["--bytez=1"], "unknown flag '--bytez'; did you mean --bytes?"),
        (["--xyzzy"], "unknown flag '--xyzzy': bench --help lists them"),
        (["--bytes"], "--bytes needs a value: --bytes SIZE"),
        (["--bytes", "--seed", "1"], "--bytes needs a value: --bytes SIZE"),
        (["stream"], "unexpected 'stream': bench takes flags only, --help lists them"),
        (["-h"], "unexpected '-h'; did you mean --help?"),
        ([""], "unexpected '': bench takes flags only, --help lists them"),
        (["--prefetch", "al"], "--prefetch: 'al' is none of none, whole, ahead"),
        (
            ["--advice=read_mostly"],
            "--advice: 'read_mostly' is none of none, read-mostly, preferred-cpu, accessed-by; "
            "did you mean read-mostly?",
        ),
        (["--allocator", "arw"], "--allocator: 'arw' is none of raw, caching; did you mean raw?"),
        (["--iterations", "0"], "--iterations: '0' is not a whole number from 1 to 1000000"),
        (["--device", "-1"], "--device: '-1' is not a whole number from 0 to 1023"),
        (["--out="], "--out needs a folder: --out FOLDER"),
        (
            ["--oversubscription-factor="],
            "--oversubscription-factor: '' is not a number above 0, at most 1000, as 1.25",
        ),
        (["--dry-run=maybe"], "--dry-run: 'maybe' is none of true, false"),
        (
            ["--oversubscription-factor=0"],
            "--oversubscription-factor: '0' is not a number above 0, at most 1000, as 1.25",
        ),
    ],
)
def test_a_command_line_that_is_wrong_is_told_what_would_be_right(axes, flags, reason):
    assert axes(*flags) == (2, reason)


def test_help_lists_every_flag_with_its_default(core):
    text = cpp.run(core, "axes", "--nonsense", "--help").stdout
    flags = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
    common = {"--bytes", "--oversubscription-factor", "--prefetch", "--advice", "--allocator"}
    common |= {"--iterations", "--seed", "--device", "--allow-oversubscription", "--out", "--help"}
    assert flags == common | {"--pattern", "--tape", "--layer-ranges", "--dry-run"}
    assert "as often as this program does (default: 7)" in text
    assert text.count("--iterations N") == 1
    assert "(default: on; --no-layer-ranges turns it off)" in text
    assert (
        "  --bytes SIZE\n      managed memory in all, as 64MiB, 1.5GiB or 4096 (default: 64MiB)"
        in text
    )
    assert max(map(len, text.splitlines())) <= 104


def test_without_a_factor_nothing_is_taken_from_the_gpu(plan):
    assert plan(3 * GIB, 12 * GIB) == {
        "tensor_bytes": 3 * GIB,
        "managed_bytes": 3 * GIB,
        "free_bytes": 12 * GIB,
        "ballast_bytes": 0,
        "available_bytes": 12 * GIB,
        "tensor_oversubscription_factor": 0.25,
        "oversubscription_factor": 0.25,
        "free_bytes_at_end": None,
    }


def test_a_factor_counts_tensors_whatever_is_reserved_for_them(plan):
    # 1 GiB at factor 0.5 leaves 2 GiB of 8: of 1.5 GiB in segments that is three quarters.
    assert plan(GIB, 8 * GIB, factor=0.5, reserved=3 * GIB // 2) == {
        "tensor_bytes": GIB,
        "managed_bytes": 3 * GIB // 2,
        "free_bytes": 8 * GIB,
        "ballast_bytes": 6 * GIB,
        "available_bytes": 2 * GIB,
        "tensor_oversubscription_factor": 0.5,
        "oversubscription_factor": 0.75,
        "free_bytes_at_end": None,
    }


def test_what_is_reserved_must_fit_on_the_gpu_and_on_the_host(plan):
    # Of 1 GiB 64 MiB stay free. 1.5 GiB and 64 MiB would do: a factor of 1024 over 1600.
    assert plan(GIB, 8 * GIB, factor=1, reserved=3 * GIB // 2) == (
        "refused: 1.5 GiB of managed memory, in segments for 1 GiB of tensors, is more than the 960 MiB that fit safely "
        "into the 1 GiB that the GPU has left after the ballast: some drivers can hang the whole machine when they evict; "
        "--allow-oversubscription does it all the same; without it, at most --oversubscription-factor 0.64"
    )
    assert plan(GIB, 8 * GIB, factor=0.64, reserved=3 * GIB // 2)["available_bytes"] == 1600 * MIB
    assert plan(GIB, 8 * GIB, factor=0.641, reserved=3 * GIB // 2).startswith("refused")
    # Of 16 GiB two stay free: 13 GiB of tensors would do, 15 GiB of segments do not.
    assert plan(13 * GIB, 20 * GIB, host=16 * GIB)["ballast_bytes"] == 0
    assert plan(13 * GIB, 20 * GIB, host=16 * GIB, reserved=15 * GIB).startswith(
        "refused: the host has 16 GiB available for 15 GiB of managed memory"
    )


@pytest.mark.parametrize(
    ("managed", "free", "factor", "ballast", "got"),
    [
        # An 80 GiB card: 60 GiB at factor 0.75 are all of it.
        (60 * GIB, 80 * GIB, 0.75, 0, 0.75),
        # 1 GiB of 8 GiB at factor 0.5 leaves 2 GiB, at factor 1 leaves 1 GiB.
        (GIB, 8 * GIB, 0.5, 6 * GIB, 0.5),
        (GIB, 8 * GIB, 1.0, 7 * GIB, 1.0),
        # 1 GiB at 1.25 leaves 819.2 MiB; 8192 - 819.2 = 7372.8 MiB, rounded down to 7372: 820 stay.
        (GIB, 8 * GIB, 1.25, 7372 * MIB, 1024 / 820),
        # 3 MiB less than 8 GiB is free, an odd number of MiB: 8189 - 1024 = 7165, so 7164; 1025 stay.
        (GIB, 8 * GIB - 3 * MIB, 1.0, 7164 * MIB, 1024 / 1025),
        # 48 MiB at 3 leaves 16 MiB: the least that is allowed.
        (48 * MIB, 24 * GIB, 3.0, 24 * GIB - 16 * MIB, 3.0),
    ],
)
def test_a_ballast_leaves_what_the_factor_says(plan, managed, free, factor, ballast, got):
    found = plan(managed, free, factor=factor, allow=True)
    assert found["ballast_bytes"] == ballast
    assert found["available_bytes"] == free - ballast
    assert found["oversubscription_factor"] == pytest.approx(got, rel=1e-15)


def test_rounding_never_makes_a_factor_larger_than_asked(plan):
    for managed in (GIB - 1, GIB, GIB + 1, 777 * MIB + 4096):
        for factor in (0.9, 1.0, 1.1, 1.5, 2.0):
            found = plan(managed, 8 * GIB + 12345, factor=factor, allow=True)
            assert found["ballast_bytes"] % (2 * MIB) == 0
            assert found["oversubscription_factor"] <= factor
            assert managed / factor <= found["available_bytes"] < managed / factor + 2 * MIB


def test_a_factor_that_the_card_cannot_give_is_refused_with_what_it_can(plan):
    assert plan(8 * GIB, 10 * GIB, factor=0.5) == (
        "refused: --oversubscription-factor 0.5 needs 16 GiB of free GPU memory for 8 GiB, and "
        "10 GiB are free: at least factor 0.8, or at most 5368709120 bytes of managed memory"
    )


@pytest.mark.parametrize(
    ("managed", "free"),
    [(8 * GIB + 12345, 10 * GIB), (777 * MIB, 99 * MIB), (3 * GIB, 80 * GIB - 1)],
)
def test_what_a_refused_factor_is_told_instead_is_then_taken(plan, managed, free):
    factor = managed / free * 0.9
    told = plan(managed, free, factor=factor)
    least, most = re.search(r"at least factor (\S+), or at most (\d+) bytes", told).groups()
    assert "e" not in least  # as a flag takes it
    assert plan(managed, free, factor=least, allow=True)["ballast_bytes"] < 2 * MIB + free / 1000
    assert plan(int(most), free, factor=factor, allow=True)["ballast_bytes"] == 0
    assert plan(int(most) + 1, free, factor=factor, allow=True).startswith("refused")


@pytest.mark.parametrize("managed", [64 * MIB + 5, 99 * MIB, 33 * MIB, 16 * MIB, 5, 3000 * MIB - 1])
def test_what_a_factor_that_is_too_large_is_told_instead_is_then_taken(plan, managed):
    told = plan(managed, 8 * GIB, factor=900, allow=True)
    most = re.search(r"at most factor (\S+), or more", told)[1]
    assert "e" not in most
    assert plan(managed, 8 * GIB, factor=most, allow=True)["available_bytes"] >= 16 * MIB


def test_a_factor_that_leaves_the_driver_too_little_is_refused(plan):
    assert plan(64 * MIB, 8 * GIB, factor=8, allow=True) == (
        "refused: --oversubscription-factor 8 would leave 8 MiB on the GPU, and the driver needs "
        "16 MiB: at most factor 4, or more managed memory"
    )


def test_more_managed_memory_than_the_gpu_has_room_for_takes_a_flag(plan):
    # A thirty-second of 10 GiB stays free, 320 MiB: page tables and a profiler come later.
    room = 10 * GIB - 320 * MIB
    assert plan(room + 1, 10 * GIB) == (
        "refused: 10401873921 B of managed memory is more than the 10401873920 B that fit safely into the 10 GiB that the "
        "GPU has free: some drivers can hang the whole machine when they evict; --allow-oversubscription does it all the "
        "same"
    )
    assert plan(18 * GIB, 12 * GIB).startswith(
        "refused: 18 GiB of managed memory is more than the 11.62 GiB that fit safely into the 12 GiB that"
    )
    assert plan(room, 10 * GIB)["oversubscription_factor"] == room / (10 * GIB)
    assert plan(12 * GIB, 12 * GIB, allow=True)["oversubscription_factor"] == 1
    assert plan(18 * GIB, 12 * GIB, allow=True)["oversubscription_factor"] == 1.5


def test_of_a_small_gpu_64_mib_stay_free(plan):
    assert plan(GIB - 64 * MIB, GIB)["ballast_bytes"] == 0
    assert plan(GIB - 64 * MIB + 1, GIB).startswith("refused: ")
    # At 2 GiB both are 64 MiB, above it a thirty-second is more.
    assert plan(2 * GIB - 64 * MIB, 2 * GIB)["ballast_bytes"] == 0
    assert plan(4 * GIB - 128 * MIB, 4 * GIB)["ballast_bytes"] == 0
    assert plan(4 * GIB - 128 * MIB + 1, 4 * GIB).startswith("refused: ")
    assert plan(1, 64 * MIB).startswith(
        "refused: 1 B of managed memory is more than the 0 B that fit"
    )


def test_more_than_a_ballast_leaves_takes_the_flag_too(plan):
    refused = plan(GIB, 8 * GIB, factor=1.25)
    assert refused.startswith(
        "refused: 1 GiB of managed memory is more than the 756 MiB that fit safely into the 820 MiB that the GPU has left "
        "after the ballast: some drivers can hang"
    )
    # 1024 over 1088
    assert refused.endswith("without it, at most --oversubscription-factor 0.9411")
    assert plan(GIB, 8 * GIB, factor=1, allow=True)["available_bytes"] == GIB


@pytest.mark.parametrize("managed", [5, 33 * MIB, GIB - 1, 3 * GIB, 60 * GIB + 12345])
def test_the_highest_factor_that_needs_no_flag_is_then_taken(plan, managed):
    told = plan(managed, 80 * GIB, factor=0.99)
    most = re.search(r"without it, at most --oversubscription-factor (\S+)$", told)
    most = most or re.search(
        r"at most factor (\S+), or more", told
    )  # 16 MiB must be left in any case
    answer = plan(managed, 80 * GIB, factor=most[1])
    if managed > 5:
        assert answer["oversubscription_factor"] > float(most[1]) * 0.97
        assert answer["available_bytes"] - managed >= 64 * MIB
    # Where no factor would do, none is named.
    assert "without it" not in plan(10 * GIB, 10 * GIB, factor=1.1)


def test_the_host_must_have_memory_for_all_of_it_flag_or_not(plan):
    # An eighth of 16 GiB must stay free: 14 GiB are the most.
    assert plan(14 * GIB, 8 * GIB, allow=True, host=16 * GIB)["oversubscription_factor"] == 1.75
    assert plan(14 * GIB + 1, 8 * GIB, allow=True, host=16 * GIB) == (
        "refused: the host has 16 GiB available for 14 GiB of managed memory, of which 2 GiB must "
        f"stay free: at most {14 * GIB} bytes (--allow-oversubscription does not change this)"
    )
    # Of 1 GiB an eighth would be too little: half a GiB stays free.
    assert ": at most 536870912 bytes" in plan(GIB, 8 * GIB, host=GIB)
    assert plan(512 * MIB, 8 * GIB, host=GIB)["ballast_bytes"] == 0
    assert plan(1, 8 * GIB, host=256 * MIB).endswith("must stay free: end other programs")


def test_where_the_host_memory_is_not_known_nothing_may_be_evicted_to_it(plan):
    assert plan(GIB, 8 * GIB, host="unknown")["ballast_bytes"] == 0
    assert plan(GIB, 8 * GIB, host=0).startswith("refused: the host has 0 B available for 1 GiB")
    assert "MemAvailable in /proc/meminfo" in plan(9 * GIB, 8 * GIB, allow=True, host="unknown")


def test_a_gpu_without_free_memory_is_refused(plan):
    assert plan(GIB, 0, allow=True) == (
        "refused: the GPU has no memory free: end what else runs there"
    )
    assert plan(GIB, 15 * MIB, allow=True) == (
        "refused: the GPU has 15 MiB free, and the driver needs 16 MiB to evict: end what else "
        "runs there"
    )
    assert plan(0, GIB) == "usage: a run needs managed memory, at least 1 byte"


def test_no_more_managed_memory_is_taken_than_gpu_or_host_have_whatever_was_planned(core):
    def limit(line):
        return cpp.run(core, "limit", stdin=line).stdout.strip()

    # factor, flag, tensors, reserved, free, host: at factor 0.5 GiB leaves 2 GiB; of 1 TiB an eighth stays free.
    gpu = "the GPU has for it without --allow-oversubscription"
    assert limit(f"0.5 no {GIB} {GIB} {8 * GIB} {1 << 40}") == f"{2 * GIB} {gpu}"
    assert limit(f"0.5 no {GIB} {GIB} {8 * GIB} unknown") == f"{2 * GIB} {gpu}"
    host = f"{896 * GIB} the host has for it"
    assert limit(f"0.5 yes {GIB} {GIB} {8 * GIB} {1 << 40}") == host
    assert limit(f"0 no {GIB} {GIB} {8 * GIB} {4 * GIB}") == f"{7 * GIB // 2} the host has for it"


def test_sizes_at_the_end_of_64_bits_do_not_wrap(plan):
    top = 2**64 - 1
    assert plan(top, 8 * GIB, factor=0.001).startswith(
        "refused: --oversubscription-factor 0.001 needs 16 EiB of free GPU memory for 16 EiB, and"
    )
    assert plan(top, 8 * GIB, allow=True).startswith("refused: the host has 1 TiB available")


def test_json_says_any_text_and_number(core):
    lines = ['a"b\\c', "tab\tbell\a", "grün 日本 🙂", "del\x7f"]
    found = json.loads(cpp.run(core, "json", stdin="\n".join(lines)).stdout)
    assert found == [*lines, 2**64 - 1, -1, 0.1, 0.1 + 0.2, None, {"a": True, "b": 2}]


def test_a_key_that_is_added_again_keeps_its_place(core):
    assert cpp.run(core, "json").stdout.endswith(
        '0.1, 0.30000000000000004, null, {"a": true, "b": 2}]\n'
    )


# Cut short, a lone continuation, overlong (2 and 3 bytes), a surrogate, above U+10FFFF, Latin-1.
NOT_UTF8 = [
    b"\xe6\x97",
    b"\x80",
    b"\xc0\xaf",
    b"\xe0\x80\xaf",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
]
NOT_UTF8 += [b"gr\xfcn", b"\xf0\x80\x80\xaf", b"\xff\xfe"]


@pytest.mark.parametrize("raw", NOT_UTF8)
def test_bytes_that_are_no_utf8_become_replacement_characters(core, raw):
    done = cpp.run(core, "json", stdin=raw.decode("utf-8", "surrogateescape"))
    text = json.loads(done.stdout.encode("utf-8"))[0]
    ascii_part = "".join(chr(byte) for byte in raw if byte < 0x80)
    assert text.replace("\ufffd", "") == ascii_part
    assert text.count("\ufffd") == sum(byte >= 0x80 for byte in raw)


@pytest.fixture
def machine(core, tmp_path):
    """Read the facts of a machine whose files are given by path and text."""

    def read(files, **environment):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        bare = dict.fromkeys(PROFILER_VARIABLES, "")
        done = cpp.run(core, "environment", tmp_path, environment={**bare, **environment})
        return json.loads(done.stdout)

    return read


PROFILER_VARIABLES = (
    "NSYS_PROFILING_SESSION_ID",
    "CUDA_INJECTION64_PATH",
    "NVTX_INJECTION64_PATH",
)
MEMINFO = "MemTotal:       33554432 kB\nMemFree:        1048576 kB\nMemAvailable:   16777216 kB\n"


def test_driver_and_module_parameters_are_read(machine):
    found = machine(
        {
            "sys/module/nvidia/version": "580.65.06\n",
            "sys/module/nvidia_uvm/parameters/uvm_perf_prefetch_enable": "1\n",
            "sys/module/nvidia_uvm/parameters/uvm_perf_fault_batch_count": "256\n",
            "proc/meminfo": MEMINFO,
            "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        }
    )
    assert found == {
        "driver_version": "580.65.06",
        "uvm_parameters": {"uvm_perf_prefetch_enable": "1", "uvm_perf_fault_batch_count": "256"},
        "host_available_bytes": 16 * GIB,
        "is_wsl": False,
        "is_profiled": False,
    }


def test_a_machine_that_tells_nothing_is_not_known(machine):
    found = machine({})
    assert found["driver_version"] == ""
    assert found["uvm_parameters"] == {}
    assert found["host_available_bytes"] is None


def test_wsl_is_known_by_its_kernel(machine):
    assert machine({"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"})["is_wsl"]


@pytest.mark.parametrize("variable", PROFILER_VARIABLES)
def test_a_profiler_is_known_by_what_it_sets(machine, variable):
    assert machine({}, **{variable: "1"})["is_profiled"]


def test_the_tightest_control_group_says_what_memory_is_available(machine):
    group = "sys/fs/cgroup/user.slice/run"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/user.slice/run\n",
        f"{group}/memory.max": "max\n",
        # 8 GiB, of which 3 are used and 1 of these is cache: 6 are left.
        "sys/fs/cgroup/user.slice/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/user.slice/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user.slice/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}\n",
    }
    assert machine(files)["host_available_bytes"] == 6 * GIB
    # The group's own limit is the tighter one now: 4 GiB, 3 used.
    files |= {f"{group}/memory.max": f"{4 * GIB}", f"{group}/memory.current": f"{3 * GIB}"}
    assert machine(files)["host_available_bytes"] == GIB


def test_a_container_of_the_older_control_groups_is_known_too(machine):
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n",
        # A container sees its own group where the root is mounted.
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
    }
    assert machine(files)["host_available_bytes"] == 3 * GIB // 2
    # More used than allowed, as for a moment it can be: nothing is left. Unlimited says a huge number.
    files["sys/fs/cgroup/memory/memory.usage_in_bytes"] = f"{9 * GIB}"
    assert machine(files)["host_available_bytes"] == 0
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712"
    assert machine(files)["host_available_bytes"] == 16 * GIB
