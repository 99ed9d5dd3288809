"""Why a run did not end well, without the folders of whoever ran it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsan.io.recording import Ran
from nsan.microbench.reasons import reason_of, without_folders

KNOWN = {2: "usage"}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("lost /home/alice/secret/file.so", "lost file.so"),
        ("lost ~/secret/file.so", "lost file.so"),
        ("lost /home/alice/my files/x/y", "lost y"),
        ("lost /home/alice/my old lab files/x/y: no", "lost y: no"),
        ("lost '/home/alice/a b c d e f g/x y'", "lost 'x y'"),
        ('lost "/home/alice/x": see /home/bob/z', 'lost "x": see z'),
        ("/home/alice/x and /home/bob/y", "x and y"),
        ("/home/alice/x: see docs/y", "x: see docs/y"),
        ("read /proc/meminfo and /sys/module/nvidia_uvm/x", None),
        ("12 MiB/s and 3/4, n/a", None),
        ("/file", None),
        ("two\nlines", "two lines"),
    ],
)
def test_only_the_names_of_files_are_left(text, left):
    assert without_folders(text) == (text if left is None else left)


def test_folders_that_are_known_go_whatever_their_names_are():
    own = Path("/home/alice/a b c d e f g")
    assert without_folders(f"cannot write {own}/x/y", [own]) == "cannot write x/y"


def test_folders_in_what_a_program_says_of_itself_are_found(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/alice (old), x"))
    assert without_folders("no /home/alice (old), x/y") == "no y"


@pytest.mark.parametrize(
    ("status", "lines", "about", "reason"),
    [
        (2, ("uvm_bench: no such flag",), {}, "no such flag"),
        (2, (), {}, "exit status 2"),
        (41, ("lost",), {}, "exit status 41: lost"),
        (-9, (), {}, "killed by signal 9"),
        (1, ("last words",), {"reason": "the driver hung"}, "the driver hung"),
    ],
)
def test_a_reason_is_what_the_tables_say_or_the_last_words(status, lines, about, reason):
    assert reason_of("uvm_bench", Ran(status, 0.1, lines), about, KNOWN) == reason
