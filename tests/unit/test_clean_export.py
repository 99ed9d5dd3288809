"""A cleaned export has every event of its source, and nothing about people or the machine."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import exports as x
import pytest

import nsan
from nsan.errors import DamagedExportError
from nsan.io.clean_export import LeakError, write_clean

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


ENVIRONMENT = (
    "TERM=xterm;USER=janedoe;HOME=/home/bob;PWD=/scratch/falcon/job;LOGNAME=jo;API_TOKEN=s3cr3t-1"
)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("run of janedoe", ENVIRONMENT),
        ("run_of_janedoe2", ENVIRONMENT),
        ("step of jo", ENVIRONMENT),
        ("bob's model", ENVIRONMENT),
        ("see falcon", ENVIRONMENT),
        ("a job", ENVIRONMENT),
        ("s3cr3t-1", ENVIRONMENT),
        ("of team-blue", "LD_LIBRARY_PATH=/usr/lib:/opt/team-blue/lib"),
    ],
)
def test_a_name_that_stands_in_the_environment_only_is_not_given_away(whole, tmp_path, text, place):
    with closing(sqlite3.connect(whole)) as connection:
        connection.execute(
            "UPDATE TARGET_INFO_SYSTEM_ENV SET value = ? WHERE name = 'DeviceEnvironment'", (place,)
        )
        connection.execute(
            f"UPDATE StringIds SET value = ? WHERE id = (SELECT shortName FROM {x.KERNEL} LIMIT 1)",
            (text,),
        )
        connection.commit()
    with pytest.raises(LeakError, match="DeviceEnvironment"):
        write_clean(whole, tmp_path / "clean.sqlite")
    assert not (tmp_path / "clean.sqlite").exists()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("PROCESS_0:ENVIRONMENT_VARIABLE", 'LOGNAME="janedoe"', "run of janedoe"),
        ("PROCESS_0:ENVIRONMENT_VARIABLE", 'HOME="/home/bob"', "of bob"),
        ("PROCESS_0:COMMAND", "/home/bob/secret-plan/train", "secret-plan"),
        ("PROCESS_0:ARGUMENT_3", "--data=/mnt/whale/x.bin", "the whale"),
    ],
)
def test_a_name_of_one_variable_or_argument_is_not_given_away(whole, tmp_path, key, value, text):
    with closing(sqlite3.connect(whole)) as connection:
        connection.execute("INSERT INTO META_DATA_CAPTURE VALUES (?, ?)", (key, value))
        connection.execute(
            f"UPDATE StringIds SET value = ? WHERE id = (SELECT shortName FROM {x.KERNEL} LIMIT 1)",
            (text,),
        )
        connection.commit()
    with pytest.raises(LeakError, match=key.partition(":")[2]):
        write_clean(whole, tmp_path / "clean.sqlite")


def test_words_that_only_look_like_a_name_of_the_environment_are_given_away(whole, tmp_path):
    # "jo" stands in "major", "job" in "jobs"; root, bin and cuda are everywhere.
    with closing(sqlite3.connect(whole)) as connection:
        connection.execute(
            "UPDATE TARGET_INFO_SYSTEM_ENV SET value = ?, devStateName = 'node17.secret' "
            "WHERE name = 'DeviceEnvironment'",
            ("USER=root;LOGNAME=jo;PWD=/home/alice/job;PATH=/usr/local/cuda-12.4/bin",),
        )
        connection.execute("UPDATE TARGET_INFO_SYSTEM_ENV SET devStateName = 'node17.secret'")
        connection.execute(
            "UPDATE StringIds SET value = 'major jobs of root in cuda bin' WHERE id = "
            f"(SELECT shortName FROM {x.KERNEL} LIMIT 1)"
        )
        connection.commit()
    write_clean(whole, tmp_path / "clean.sqlite")
    assert b"node17" not in (tmp_path / "clean.sqlite").read_bytes()


def test_what_is_no_export_leaves_nothing(tmp_path):
    bad = tmp_path / "bad?mode=rw.sqlite"
    bad.write_bytes(b"SQLite format 3\0" + bytes(4096))
    with pytest.raises(DamagedExportError):
        write_clean(bad, tmp_path / "clean.sqlite")
    assert {each.name for each in tmp_path.iterdir()} == {bad.name}
