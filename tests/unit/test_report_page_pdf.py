"""Printing a page: which program is asked, and what is said where that does not work."""

from __future__ import annotations

import time

import pytest

from nsan.report import pdf
from nsan.report.pdf import ChromiumNotFoundError, PrintingFailedError, find_chromium, pdf_of

PRINTS = """#!/bin/sh
for each in "$@"; do case "$each" in --print-to-pdf=*) target="${each#*=}";; esac; done
printf '%%PDF-1.4 %s|' "$@" > "$target"
printf '%s' "$HOME" >> "$target"
cp "${target%.pdf}.html" "$COPY"
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a program in the place of Chromium."""

    def of(text, name="chromium"):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        monkeypatch.setenv("NSAN_CHROMIUM", str(path))
        return path

    return of


def test_a_program_that_is_named_is_taken_and_no_other(program, monkeypatch):
    path = program("#!/bin/sh\n")
    assert find_chromium() == str(path)
    monkeypatch.setenv("NSAN_CHROMIUM", str(path) + "-gone")
    with pytest.raises(ChromiumNotFoundError, match=r"gone is no program.*NSAN_CHROMIUM.*\.html"):
        find_chromium()


@pytest.mark.parametrize("name", ["chromium-browser", "google-chrome", "chrome"])
def test_without_a_name_any_chromium_on_the_path_is_found(name, program, monkeypatch, tmp_path):
    path = program("#!/bin/sh\n", name)
    monkeypatch.delenv("NSAN_CHROMIUM")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_chromium() == str(path)


def test_where_there_is_none_the_way_out_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("NSAN_CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ChromiumNotFoundError, match=r"none was found\. Install one, or set.*\.html"
    ):
        pdf_of("<p>")


def test_the_page_is_printed_without_a_network_in_a_home_of_its_own(program, monkeypatch, tmp_path):
    program(PRINTS)
    monkeypatch.setenv("COPY", str(tmp_path / "copy.html"))
    printed = pdf_of("<p>é</p>").decode()
    assert (tmp_path / "copy.html").read_text(encoding="utf-8") == "<p>é</p>"
    assert "--host-resolver-rules=MAP * ~NOTFOUND|" in printed
    assert "--no-pdf-header-footer|" in printed
    assert "--user-data-dir=" + printed.rpartition("|")[2] in printed
    assert not pdf.Path(printed.rpartition("|")[2]).exists()


@pytest.mark.parametrize("user", [0, 1000])
def test_only_root_prints_without_the_sandbox(user, program, monkeypatch, tmp_path):
    program(PRINTS)
    monkeypatch.setenv("COPY", str(tmp_path / "copy.html"))
    monkeypatch.setattr(pdf.os, "geteuid", lambda: user)
    assert (b"--no-sandbox" in pdf_of("<p>")) == (user == 0)


def test_a_program_that_fails_is_named_with_what_it_said(program):
    program(
        "#!/bin/sh\necho 'cannot open \x1b[31mdisplay' >&2\necho ERROR:dbus/bus.cc >&2\nexit 3\n"
    )
    with pytest.raises(PrintingFailedError) as caught:
        pdf_of("<p>")
    assert "chromium gave no PDF (cannot open \\x1b[31mdisplay)" in str(caught.value)


def test_a_program_that_says_nothing_is_named_with_its_status(program):
    program("#!/bin/sh\nexit 3\n")
    with pytest.raises(PrintingFailedError, match="exit status 3"):
        pdf_of("<p>")


def test_a_program_that_never_ends_is_ended_with_all_that_it_started(
    program, monkeypatch, tmp_path
):
    program(f"#!/bin/sh\n(sleep 2; touch {tmp_path}/late) &\nsleep 60\n")
    monkeypatch.setattr(pdf, "SECONDS", 0.2)
    with pytest.raises(PrintingFailedError, match=r"no answer within 0\.2 s"):
        pdf_of("<p>")
    time.sleep(2.3)
    assert not (tmp_path / "late").exists()


def test_a_file_that_is_no_program_of_this_machine_is_an_error_of_ours(program):
    program("\x7fELF not one")
    with pytest.raises(PrintingFailedError, match="Exec format"):
        pdf_of("<p>")
