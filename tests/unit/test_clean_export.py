"""A cleaned export has every event of its source, and nothing about people or the machine."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import exports as x
import pytest

import nsan
from nsan.errors import DamagedExportError
from nsan.io.clean_export import LeakError, write_clean
from nsan.microbench.catalog import PATTERNS, SCRIPTS
from nsan.microbench.device_cases import cases

UM = "um_easycuda_rtx4060l_2023.4.4_lazy"
PRIVATE = {
    "META_DATA_EXPORT": {"EXPORT_HOST": "secret-host-one", "EXPORT_USER": "alice"},
    "META_DATA_CAPTURE": {
        "DEVICE_DISPLAY_NAME": "secret-host-two",
        "PROCESS_0:COMMAND": "/home/alice/run --password=secret-word",
        "PROCESS_0:WORKING_DIR": "/home/alice/project",
        "PROCESS_0:USER_NAME": "alice",
        "PROCESS_0:ENVIRONMENT_VARIABLE": "TOKEN=secret-token",
    },
    "TARGET_INFO_SYSTEM_ENV": {
        "Hostname": "secret-host-three",
        "DeviceEnvironment": "A=secret-env",
    },
}


@pytest.fixture
def whole(real):
    """A real export, with something private wherever nsys puts such things."""
    path = real(UM)
    with closing(sqlite3.connect(path)) as connection:
        for table, pairs in PRIVATE.items():
            for name, value in pairs.items():
                connection.execute(f"UPDATE {table} SET value = ? WHERE name = ?", (value, name))
        connection.execute("UPDATE PROCESSES SET name = '/home/alice/' || name")
        connection.execute("INSERT INTO StringIds VALUES (999999, 'a thread of alice')")
        connection.execute("UPDATE TARGET_INFO_GPU SET uuid = 'GPU-secret-uuid'")
        connection.execute(
            "UPDATE TARGET_INFO_SESSION_START_TIME SET localTime = 'secret-time-zone'"
        )
        connection.commit()
    assert b"secret" in path.read_bytes()
    return path


def rows_of(path, table):
    return sorted(x.ask(path, f"SELECT * FROM {table}"))


def test_events_are_those_of_the_source_and_nothing_private_is_left(whole, tmp_path):
    clean = tmp_path / "clean.sqlite"
    before = whole.read_bytes()
    write_clean(whole, clean)
    assert whole.read_bytes() == before
    assert b"secret" not in clean.read_bytes()
    for table in (x.MEMCPY, x.KERNEL, x.RUNTIME, "ENUM_CUDA_MEMCPY_OPER"):
        assert rows_of(clean, table) == rows_of(whole, table)
    # Of 442 processes the one that used the GPU, of 706 texts those that an event names.
    assert [name for _, _, name in rows_of(clean, "PROCESSES")] == ["add_with_n_Threads"]
    assert len(rows_of(clean, "StringIds")) < 50


@pytest.mark.parametrize(
    "name",
    [
        UM,
        "um_easycuda_rtx4060l_2023.4.4_nonlazy",
        "nokernels_rtx4060_2025.5.1",
        "nonlazy_saxpy_mpi_a100_2022.2.1",
        "rtx4060ti_2026.1.1",
        "h100_2proc_2gpu_nvtx_2026.2.1",
    ],
)
def test_nsan_says_the_same_of_a_cleaned_export(real, tmp_path, name):
    whole, clean = real(name), tmp_path / "clean.sqlite"
    write_clean(whole, clean)
    before, after = (nsan.summary(path) for path in (whole, clean))
    for document in (before, after):
        del document["source"]
    assert after == before
    names = [
        nsan.open_trace(path).kernels.select("name", "demangled").collect()
        for path in (whole, clean)
    ]
    assert names[0].equals(names[1])
    assert clean.stat().st_size < whole.stat().st_size


def test_files_of_cpu_faults_lose_their_folders(built, tmp_path):
    export = x.Export().add(x.CPU_FAULTS, x.cpu_fault(0, function=901, module=902))
    path = built(export)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "INSERT OR REPLACE INTO StringIds VALUES (901, 'fill'), (902, '/home/bob/a.so')"
        )
        connection.commit()
    write_clean(path, tmp_path / "clean.sqlite")
    texts = dict(rows_of(tmp_path / "clean.sqlite", "StringIds"))
    assert (texts[901], texts[902]) == ("fill", "a.so")


def test_a_name_in_the_program_that_is_private_is_not_given_away(whole, tmp_path):
    with closing(sqlite3.connect(whole)) as connection:
        connection.execute(
            "UPDATE StringIds SET value = 'train_on_secret-host-two' WHERE id = "
            f"(SELECT shortName FROM {x.KERNEL} LIMIT 1)"
        )
        connection.commit()
    with pytest.raises(LeakError, match="DEVICE_DISPLAY_NAME"):
        write_clean(whole, tmp_path / "clean.sqlite")
    assert not (tmp_path / "clean.sqlite").exists()


@pytest.mark.parametrize("user", ["janedoe", "node-17"])
def test_a_user_is_found_in_what_is_said_of_the_machine_too(whole, tmp_path, user):
    with closing(sqlite3.connect(with_kernel(whole, "k", EXPORT_USER=user))) as connection:
        connection.execute("UPDATE TARGET_INFO_GPU SET name = ?", (f"GPU of {user}",))
        connection.commit()
    with pytest.raises(LeakError, match=rf"'{user}' \(EXPORT_USER\)"):
        write_clean(whole, tmp_path / "clean.sqlite")


ENVIRONMENT = (
    "TERM=xterm;USER=janedoe;HOME=/home/alice;PWD=/scratch/falcon/job;LOGNAME=jo;API_TOKEN=s3cr3t-1"
)


def with_kernel(path, text, environment="", **pairs):
    """Name a kernel, and say what the environment and the recording have."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "UPDATE TARGET_INFO_SYSTEM_ENV SET value = ? WHERE name = 'DeviceEnvironment'",
            (environment,),
        )
        for key, value in pairs.items():
            connection.execute("INSERT INTO META_DATA_CAPTURE VALUES (?, ?)", (key, value))
            connection.execute("UPDATE META_DATA_EXPORT SET value = ? WHERE name = ?", (value, key))
        connection.execute(
            f"UPDATE StringIds SET value = ? WHERE id = (SELECT shortName FROM {x.KERNEL} LIMIT 1)",
            (text,),
        )
        connection.commit()
    return path


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("run of janedoe", ENVIRONMENT, r"'janedoe' \(USER of DeviceEnvironment\)"),
        ("a.janedoe/x", ENVIRONMENT, "'janedoe'"),
        ("step of jo/x", ENVIRONMENT, r"'jo' \(LOGNAME of DeviceEnvironment\)"),
        ("alice's model", ENVIRONMENT, "'alice'"),
        ("see falcon", ENVIRONMENT, r"'falcon' \(a folder in PWD of DeviceEnvironment\)"),
        ("job/7", ENVIRONMENT, "'job'"),
        ("the_s3cr3t-12", ENVIRONMENT, r"the value of API_TOKEN \(DeviceEnvironment\)"),
        ("of team-blue", "LD_LIBRARY_PATH=/usr/lib:/opt/team-blue/lib", "'team-blue'"),
        ("train", "PWD=/scratch/train", "'train'"),
    ],
)
def test_a_name_that_stands_in_the_environment_only_is_not_given_away(
    whole, tmp_path, text, place, said
):
    with pytest.raises(LeakError, match=said) as raised:
        write_clean(with_kernel(whole, text, place), tmp_path / "clean.sqlite")
    assert "s3cr3t" not in str(raised.value)
    assert not (tmp_path / "clean.sqlite").exists()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("PROCESS_0:ENVIRONMENT_VARIABLE", 'LOGNAME="janedoe"', "run of janedoe"),
        ("PROCESS_0:ENVIRONMENT_VARIABLE", 'HOME="/home/bob"', "/home/bob/x"),
        ("PROCESS_0:COMMAND", "/home/bob/secret-plan/train", "secret-plan"),
        ("PROCESS_0:ARGUMENT_3", "--data=/mnt/whale/x.bin", "the whale"),
        ("PROCESS_1:USER_NAME", "janedoe", "of janedoe"),  # that of process 0 is another
    ],
)
def test_a_name_of_one_variable_or_argument_is_not_given_away(whole, tmp_path, key, value, text):
    with pytest.raises(LeakError, match=key.partition(":")[2]):
        write_clean(with_kernel(whole, text, **{key: value}), tmp_path / "clean.sqlite")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        # "jo" stands in "major", "job" in "jobs"; root, bin and cuda are everywhere.
        (
            "major jobs of root in cuda bin",
            "USER=root;LOGNAME=jo;PWD=/home/alice/job;PATH=/usr/local/cuda-12.4/bin",
        ),
        ("constrained trained_model", "PWD=/scratch/train"),
        ("max of a job", "USER=max;PWD=/home/alice/job"),
        ("main cache, bench, build and out", "LD_LIBRARY_PATH=/srv/main/out/x:/b/bench/build/x"),
        ("bench uvm_bench", "PATH=/home/alice/.cache/nsan/bench/0a1b2c/uvm_bench"),
        ("stream", "USER=stream"),
        ("sum<float, false>", "TOKENIZERS_PARALLELISM=false"),
        ("at", "CUPTI=/opt/x86_64/lib"),  # which nsys says of the machine
    ],
)
def test_words_that_only_look_like_a_name_of_the_environment_are_given_away(
    whole, tmp_path, text, place
):
    with closing(sqlite3.connect(with_kernel(whole, text, place))) as connection:
        connection.execute("UPDATE TARGET_INFO_SYSTEM_ENV SET devStateName = 'node17.secret'")
        connection.commit()
    write_clean(whole, tmp_path / "clean.sqlite")
    assert b"node17" not in (tmp_path / "clean.sqlite").read_bytes()


@pytest.mark.parametrize("user", ["stream", "dtoh", "trace"])
def test_a_user_who_is_named_as_a_word_of_exports_can_give_away(whole, tmp_path, user):
    """Columns have such names (``streamId``); what a program wrote does not."""
    clean = tmp_path / "clean.sqlite"
    write_clean(with_kernel(whole, "a kernel", EXPORT_USER=user), clean)
    assert rows_of(clean, x.KERNEL) == rows_of(whole, x.KERNEL)


def test_names_of_nsans_own_programs_patterns_and_cases_tell_nothing(whole, tmp_path):
    own = {*PATTERNS, *SCRIPTS, *(name for case in cases() for name in (case.name, case.program))}
    folders = ":".join(f"/srv/{name}/x" for name in sorted(own))
    with_kernel(whole, " ".join(own), f"LD_LIBRARY_PATH={folders}")
    write_clean(whole, tmp_path / "clean.sqlite")
    assert " ".join(own) in {text for _, text in rows_of(tmp_path / "clean.sqlite", "StringIds")}


def test_what_is_no_export_leaves_nothing(tmp_path):
    bad = tmp_path / "bad?mode=rw.sqlite"
    bad.write_bytes(b"SQLite format 3\0" + bytes(4096))
    with pytest.raises(DamagedExportError):
        write_clean(bad, tmp_path / "clean.sqlite")
    assert {each.name for each in tmp_path.iterdir()} == {bad.name}
