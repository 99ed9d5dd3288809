"""What `nsan recipe path` and `install` write, as real shells read it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsan.cli import main, recipe_shells
from nsan.cli.recipe_block import BrokenBlockError, read, with_block, without_block, write
from nsan.cli.recipe_shells import (
    RECIPE_FOLDER,
    RECIPES,
    REPORT_FOLDER,
    REPORTS,
    fish_quoted,
    start_lines,
)

SHELLS = [shell for shell in ("sh", "bash", "dash", "zsh") if shutil.which(shell)]
OWN = "/home/alice/my reports"


@pytest.fixture
def clean(monkeypatch):
    for name in (REPORTS, RECIPES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHELL", "/bin/bash")


@pytest.fixture
def odd(monkeypatch, tmp_path):
    """nsan in a folder whose name a shell would take apart."""
    place = tmp_path / 'it\'s $HOME `x` \\ "y" *'
    for name, inner in (("REPORT_FOLDER", "stats_reports"), ("RECIPE_FOLDER", "recipes")):
        (place / inner).mkdir(parents=True)
        monkeypatch.setattr(recipe_shells, name, place / inner)
    return place


def typed(shell, script, **environment):
    """Run a script; return both variables as a child of that shell has them."""
    kept = {key: value for key, value in os.environ.items() if key not in {REPORTS, RECIPES}}
    show = f'\nprintf "%s\\n" "${REPORTS}" "${RECIPES}"'
    done = subprocess.run(
        [shell, "-c", script + show],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split("\n")[:2]


def printed(capsys, *arguments):
    status = main(["recipe", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.usefixtures("clean")
def test_what_path_prints_sets_both_variables_in_a_real_shell(shell, capsys, odd):
    status, out, err = printed(capsys, "path")
    assert (status, err) == (0, "")
    assert typed(shell, out) == [str(odd / "stats_reports"), str(odd / "recipes")]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.usefixtures("clean")
def test_reports_of_ones_own_stay_and_nsan_s_come_once(shell, capsys, monkeypatch):
    monkeypatch.setenv(REPORTS, OWN)
    _, out, _ = printed(capsys, "path")
    once = typed(shell, out)[0]
    assert once == f"{REPORT_FOLDER}:{OWN}"
    monkeypatch.setenv(REPORTS, once)
    _, out, _ = printed(capsys, "path")
    assert typed(shell, out)[0] == once


@pytest.mark.usefixtures("clean")
def test_another_recipe_folder_is_not_replaced_unasked(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(RECIPES, str(tmp_path))
    status, out, err = printed(capsys, "path")
    assert status == 1
    assert f"export {RECIPES}" not in out
    assert f"export {REPORTS}" in out
    assert f"--into {tmp_path}" in err
    status, out, _ = printed(capsys, "path", "--replace")
    assert status == 0
    assert f"export {RECIPES}={RECIPE_FOLDER}" in out


@pytest.mark.usefixtures("clean")
def test_json_has_what_the_variables_should_be(capsys):
    _, out, _ = printed(capsys, "path", "--json")
    assert json.loads(out)["variables"] == {
        REPORTS: str(REPORT_FOLDER),
        RECIPES: str(RECIPE_FOLDER),
    }


@pytest.mark.usefixtures("clean")
def test_fish_gets_a_list_and_its_own_quotes(capsys, monkeypatch):
    monkeypatch.setenv(REPORTS, "/home/alice/it's")
    _, out, _ = printed(capsys, "path", "--shell", "fish")
    assert out.splitlines()[0] == f"set -gx {REPORTS} '{REPORT_FOLDER}' '/home/alice/it\\'s'"
    assert fish_quoted("a\\b") == "'a\\\\b'"


@pytest.mark.usefixtures("clean")
def test_a_folder_with_a_colon_cannot_be_listed_and_it_is_said(capsys, monkeypatch):
    monkeypatch.setattr(recipe_shells, "REPORT_FOLDER", Path("/home/alice/a:b"))
    status, out, err = printed(capsys, "path")
    assert (status, out) == (1, "")
    assert "a colon" in err


@pytest.mark.parametrize("shell", SHELLS)
def test_the_lines_of_a_start_file_may_run_twice_and_keep_what_is_set(shell, odd):
    lines = start_lines("sh")
    reports, recipes = str(odd / "stats_reports"), str(odd / "recipes")
    assert typed(shell, lines + lines) == [reports, recipes]
    assert typed(shell, "set -u\n" + lines + lines) == [reports, recipes]
    kept = typed(shell, lines + lines, **{REPORTS: OWN, RECIPES: OWN})
    assert kept == [f"{reports}:{OWN}", OWN]


# The block -------------------------------------------------------------------------------------------

LINES = "export A=1\nexport B='x y'\n"


def without_marks(content):
    """Half a block is refused when the file is read."""
    return b">>> nsan" not in content and b"<<< nsan" not in content


@given(
    (st.binary(max_size=60) | st.text("ab\n\r# ", max_size=30).map(str.encode)).filter(
        without_marks
    )
)
def test_taking_the_block_out_gives_every_byte_back(content):
    inside = with_block(content, LINES)
    assert inside.startswith(content)
    assert inside.count(b"export A=1") == 1
    assert without_block(inside) == content


@given(*[st.binary(max_size=40).filter(without_marks)] * 2)
def test_installing_again_replaces_the_block_where_it_is(before, after):
    inside = with_block(before, LINES) + after
    again = with_block(inside, "export A=2\n")
    assert again.count(b"# >>> nsan recipe >>>") == 1
    joint = b"\n" * bool(before and not before.endswith(b"\n") and after)
    assert without_block(again) == before + joint + after
    assert with_block(again, "export A=2\n") == again


def test_lines_below_the_block_stay_lines_of_their_own_when_it_is_taken_out():
    inside = with_block(b"alias l=ls", LINES) + b"alias m=more\n"
    assert without_block(inside) == b"alias l=ls\nalias m=more\n"
    twice = with_block(b"alias l=ls", LINES) + with_block(b"", LINES)
    assert without_block(twice) == b"alias l=ls"


@pytest.mark.parametrize("mark", ["# >>> nsan recipe >>>", "# <<< nsan recipe <<<"])
def test_half_a_block_is_refused_with_its_line_and_the_file_is_as_it_was(tmp_path, mark):
    path = tmp_path / ".bashrc"
    path.write_text(f"alias l=ls\n{mark}\nexport A=1\n")
    with pytest.raises(BrokenBlockError, match="line 2"):
        read(path)


def test_a_link_stays_a_link_and_the_file_keeps_its_mode(tmp_path):
    real, link = tmp_path / "dotfiles" / "bashrc", tmp_path / ".bashrc"
    real.parent.mkdir()
    real.write_bytes(b"a\n")
    real.chmod(0o640)
    link.symlink_to(real)
    write(link, b"b\n")
    assert link.is_symlink()
    assert real.read_bytes() == b"b\n"
    assert real.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in real.parent.iterdir()] == ["bashrc"]


# The command -----------------------------------------------------------------------------------------


@pytest.fixture
def home(clean, monkeypatch, tmp_path):  # noqa: ARG001 - first nothing is set
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_install_shows_what_it_writes_and_remove_leaves_no_trace(home, capsys):
    rc = home / ".bashrc"
    rc.write_bytes(b"alias l=ls\r\nno end \xff")
    before = rc.read_bytes()
    status, out, _ = printed(capsys, "install")
    assert status == 0
    assert all(line in out for line in start_lines("sh").splitlines())
    assert rc.read_bytes().startswith(before)
    _, out, _ = printed(capsys, "install")
    assert "nothing to do" in out
    printed(capsys, "install", "--remove")
    assert rc.read_bytes() == before
    _, out, _ = printed(capsys, "install", "--remove")
    assert "nothing to do" in out


def test_a_new_shell_has_both_variables_after_install(home, capsys):
    printed(capsys, "install")
    assert typed("bash", f". {home}/.bashrc") == [str(REPORT_FOLDER), str(RECIPE_FOLDER)]


def test_a_dry_run_changes_nothing(home, capsys):
    _, out, _ = printed(capsys, "install", "--dry-run")
    assert REPORTS in out
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("/bin/bash", ".bashrc"),
        ("/usr/bin/zsh", ".zshrc"),
        ("/usr/bin/fish", ".config/fish/config.fish"),
    ],
)
def test_each_shell_has_its_start_file(home, capsys, monkeypatch, shell, file):
    for name in ("ZDOTDIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHELL", shell)
    assert printed(capsys, "install")[0] == 0
    assert REPORTS in (home / file).read_text()
    assert ("contains --" in (home / file).read_text()) == shell.endswith("fish")


def test_a_shell_that_is_not_known_asks_for_its_file(home, capsys, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    status, _, err = printed(capsys, "install")
    assert status == 2
    assert "--file FILE" in err
    assert printed(capsys, "install", "--file", str(home / "mine.fish"))[0] == 0
    assert "contains --" in (home / "mine.fish").read_text()


@pytest.mark.parametrize("shell", ["csh", "tcsh"])
def test_a_shell_of_another_language_is_refused_by_name(home, capsys, monkeypatch, shell):
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    for words in (["path"], ["install", "--file", str(home / "mine")]):
        status, out, err = printed(capsys, *words)
        assert (status, out) == (2, "")
        assert f"SHELL is '{shell}'" in err
        assert printed(capsys, *words, "--shell", "sh")[0] == 0
    assert "export" in (home / "mine").read_text()


@pytest.mark.parametrize("place", ["", "nothing/here", "{}/not there"])
def test_a_home_that_is_no_folder_is_refused_and_nothing_is_made(home, capsys, monkeypatch, place):
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", place.format(home))
    status, _, err = printed(capsys, "install")
    assert status == 2
    assert "HOME is" in err
    assert "--file FILE" in err
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--remove"], ["--dry-run"]])
def test_a_read_only_start_file_is_said_to_be_and_stays(home, capsys, words):
    rc = home / ".bashrc"
    rc.write_bytes(with_block(b"a\n", "export A=1\n") if words == ["--remove"] else b"a\n")
    rc.chmod(0o444)
    before = rc.read_bytes()
    status, out, err = printed(capsys, "install", *words)
    assert (status, out) == (1, "")
    assert f"{rc} cannot be written: it is read-only" in err
    assert "-o FILE" not in err
    assert (rc.read_bytes(), rc.stat().st_mode & 0o777) == (before, 0o444)


def test_a_start_file_that_is_a_folder_is_refused(home, capsys):
    status, _, err = printed(capsys, "install", "--file", str(home))
    assert status == 1
    assert "is not a file" in err


# The folder ------------------------------------------------------------------------------------------


def test_recipes_go_into_a_folder_of_ones_own_and_out_again(home, capsys, monkeypatch):
    own = home / "recipes"
    (own / "mine").mkdir(parents=True)
    (own / "mine" / "metadata.json").write_text("{}")
    status, out, _ = printed(capsys, "install", "--into", str(own))
    assert status == 0
    assert out.count("copied: ") == 4
    assert (own / "uvm_sum" / "uvm_sum.ipynb").is_file()
    monkeypatch.setenv(RECIPES, str(own))
    status, out, _ = printed(capsys, "path")
    assert status == 0
    assert f"export {RECIPES}={own}" in out
    (own / "uvm_sum" / "notes.txt").write_text("of the user")
    _, _, err = printed(capsys, "install", "--into", str(own), "--remove")
    assert sorted(path.name for path in own.iterdir()) == ["mine", "uvm_sum"]
    assert [path.name for path in (own / "uvm_sum").iterdir()] == ["notes.txt"]
    assert "has other files" in err


def test_a_recipe_of_somebody_else_is_not_touched(home, capsys):
    own = home / "recipes"
    (own / "uvm_sum").mkdir(parents=True)
    (own / "uvm_sum" / "uvm_sum.py").write_text("mine = 1\n")
    for words in ((), ("--remove",)):
        status, _, err = printed(capsys, "install", "--into", str(own), *words)
        assert status == 1
        assert "not of nsan" in err
    assert [path.name for path in own.iterdir()] == ["uvm_sum"]


def test_nsan_s_own_folder_is_never_emptied(home, capsys):
    before = sorted(RECIPE_FOLDER.rglob("*.ipynb"))
    own = home / "link"
    own.symlink_to(RECIPE_FOLDER)
    status, _, err = printed(capsys, "install", "--into", str(own), "--remove")
    assert status == 2
    assert "own folder" in err
    assert sorted(RECIPE_FOLDER.rglob("*.ipynb")) == before


def test_list_names_every_report_and_recipe(capsys):
    _, out, _ = printed(capsys, "list", "--json")
    found = json.loads(out)
    assert set(found["recipes"]) == {"uvm_sum", "uvm_clusters", "uvm_allocator", "uvm_time_map"}
    assert {"nsan_um_sum", "nsan_um_cause_sum"} <= set(found["reports"])
    assert all(found["reports"].values())


def test_doctor_says_whether_nsys_finds_nsan(home):
    from nsan.cli.recipe_shells import findings

    assert findings({})[REPORTS][1] != ""
    whole = {REPORTS: f"/tmp:{REPORT_FOLDER}", RECIPES: str(RECIPE_FOLDER)}
    assert [trouble for _, trouble in findings(whole).values()] == ["", ""]
    gone = findings({REPORTS: f"{REPORT_FOLDER}:{home}/gone", RECIPES: str(home / "gone")})
    assert "no such folder" in gone[REPORTS][1]
    assert "no such folder" in gone[RECIPES][1]
    other = findings({RECIPES: str(home)})
    assert f"--into {home}" in other[RECIPES][1]
