"""No wrong number presented as right, and nothing of the user's harmed, on odd but possible input."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import exports as x
import polars as pl
import pytest

import nsan
from nsan.cli import main
from nsan.errors import UsageError
from nsan.io.manifest import default_store, fingerprint


def um(n=3, **options):
    export = x.Export(**options).add(x.KERNEL, x.kernel(0, 1000))
    return export.add(x.MEMCPY, *(x.migration(10 * i, 10 * i + 5, 4096) for i in range(n)))


def health(summary):
    return {check["id"]: check for check in summary["health"]}


# Several GPUs and processes


def test_processes_that_share_an_ordinal_are_pointed_out(summary_of):
    rows = [x.kernel(0, 100, pid=1), x.kernel(0, 100, pid=2)]
    unmapped = summary_of(x.Export().add(x.KERNEL, *rows))
    assert health(unmapped)["gpus"]["status"] == "warn"
    assert "take it for one" in health(unmapped)["gpus"]["text"]
    mapped = x.Export("2025.3.1").add(x.KERNEL, *rows)
    mapped.add(x.CUDA_DEVICE, *({"gpuId": i, "cudaId": 0, "pid": i} for i in (1, 2)))
    summary = summary_of(mapped)
    assert "gpus" not in health(summary)
    assert summary["kernels"]["busy_ns"] == 200


def test_an_unmapped_ordinal_is_not_taken_for_a_mapped_gpu(summary_of):
    export = x.Export("2025.3.1")
    export.add(x.KERNEL, x.kernel(0, 100, pid=1), x.kernel(0, 100, pid=2, device=1))
    export.add(x.CUDA_DEVICE, {"gpuId": 1, "cudaId": 0, "pid": 1})
    assert summary_of(export)["kernels"]["busy_ns"] == 200


def test_fault_rows_of_mapped_gpus_keep_their_order(built):
    export = x.Export("2025.3.1")
    faults = [x.gpu_fault(i, i + 50, x.VA + 4096 * i, pid=1 + i % 2) for i in range(20_000)]
    export.add(x.GPU_FAULTS, *faults)
    export.add(x.CUDA_DEVICE, *({"gpuId": i, "cudaId": 0, "pid": i} for i in (1, 2)))
    path = built(export)
    for _ in range(3):
        store = nsan.import_trace(path, overwrite=True)
        assert health(nsan.summary(store))["fault_rows"]["status"] == "ok"


# Rows that cannot be told apart, or counted


@pytest.mark.parametrize("how", ["all", "one"])
def test_copies_of_unreadable_kind_are_not_said_to_be_no_migrations(built, capsys, how):
    export = um()
    for row in export.rows[x.MEMCPY][: None if how == "all" else 1]:
        row["copyKind"] = None
    path = built(export)
    with closing(sqlite3.connect(path)) as connection:
        # The column is NOT NULL in this version: the builder wrote 0.
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_master SET sql = replace(sql, '\"copyKind\" INTEGER NOT NULL', "
            "'\"copyKind\" INTEGER')"
        )
        connection.commit()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {x.MEMCPY} SET copyKind = NULL WHERE copyKind = 0")
        connection.commit()
    assert main(["summary", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "unknown: the column that tells its rows apart cannot be read" in out
    assert "No GPU activity" not in out
    assert "no migration" not in err


def test_a_column_named_rowid_does_not_hide_rows(built):
    path = built(um(n=10))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"ALTER TABLE {x.MEMCPY} ADD COLUMN rowid INTEGER")
        connection.execute(f"UPDATE {x.MEMCPY} SET rowid = start WHERE start < 50")
        connection.commit()
    assert nsan.summary(path)["migrations"]["n"] == 10


def test_a_view_in_place_of_a_table_is_refused(built, capsys):
    path = built(um())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"ALTER TABLE {x.MEMCPY} RENAME TO elsewhere")
        connection.execute(f"CREATE VIEW {x.MEMCPY} AS SELECT * FROM elsewhere")
        connection.commit()
    assert main([str(path)]) == 1
    assert "is a view, and nsys makes tables" in capsys.readouterr().err


def test_sums_of_sizes_do_not_wrap_around(built):
    size, n = 1 << 46, (1 << 17) + 1
    path = built(um(n=1))
    with closing(sqlite3.connect(path)) as connection:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({x.MEMCPY})")]
        others = ", ".join(f'"{c}"' for c in columns if c != "bytes")
        connection.execute(f"UPDATE {x.MEMCPY} SET bytes = {size}")
        connection.execute(
            f"INSERT INTO {x.MEMCPY} (bytes, {others}) WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL "
            f"SELECT i + 1 FROM n WHERE i < {n}) SELECT {size}, {others} FROM n, {x.MEMCPY}"
        )
        connection.commit()
    assert nsan.summary(path)["migrations"]["bytes"] == size * n > 1 << 63


# Filters


def test_the_duration_of_a_window_does_not_reach_out_of_it(trace_of):
    export = um().add(x.NVTX, x.nvtx(-500, 90_000, "all of it"))
    part = nsan.summary(trace_of(export).filter(time=(5, 25)))
    assert (part["first_ns"], part["last_ns"], part["duration_ns"]) == (5, 25, 20)


@pytest.mark.parametrize(
    "wrong",
    [{"time": 1.5}, {"time": (0.5, 2)}, {"time": (1, 2, 3)}, {"pid": "4242"}, {"device": "0"}],
)
def test_a_filter_of_the_wrong_type_is_a_usage_error(trace_of, wrong):
    with pytest.raises(UsageError):
        trace_of(um()).filter(**wrong)


def test_a_window_may_be_a_pair_of_texts(trace_of):
    part = trace_of(um()).filter(time=("0", "15ns"))
    assert part.migrations.collect().height == 2


# What is open, and what is written


def test_an_open_trace_never_reads_the_rows_of_a_later_run(built):
    path = built(um(n=3))
    trace = nsan.open_trace(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {x.MEMCPY} SET migrationCause = 4")
        connection.commit()
    again = nsan.open_trace(path)
    assert set(again.migrations.collect()["cause"]) == {"eviction"}
    assert set(trace.migrations.collect()["cause"]) == {"coherence"}


def test_a_store_that_was_placed_is_not_read_on_as_another_run(built, tmp_path):
    one, two = built(um(n=3)), built(um(n=7))
    place = nsan.import_trace(one, tmp_path / "store")
    trace = nsan.open_trace(place)
    nsan.import_trace(two, place, overwrite=True)
    with pytest.raises((pl.exceptions.PolarsError, OSError)):
        trace.migrations.collect()


def test_figures_of_another_nsan_are_made_again(built, monkeypatch):
    path = built(um())
    nsan.summary(path)
    manifest = default_store(path, fingerprint(path)) / "manifest.json"
    stored = json.loads(manifest.read_text())
    stored["totals"]["migrations"]["groups"][0]["bytes"] = 1
    manifest.write_text(json.dumps(stored))
    assert nsan.summary(path)["migrations"]["bytes"] == 1
    monkeypatch.setattr(nsan, "__version__", "99.0.0")
    assert nsan.summary(path)["migrations"]["bytes"] == 3 * 4096


def test_a_store_of_another_file_of_that_name_is_not_replaced(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    one = um(n=3).write(tmp_path / "a" / "report1.sqlite")
    two = um(n=7).write(tmp_path / "b" / "report1.sqlite")
    place = str(tmp_path / "store")
    assert main(["import", "-q", str(one), "-o", place]) == 0
    assert main(["import", "-q", str(two), "-o", place]) == 1
    assert "--force-overwrite" in capsys.readouterr().err
    assert nsan.summary(place)["migrations"]["n"] == 3


@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
def test_an_output_never_replaces_what_is_read(built, capsys, suffix):
    path = built(um())
    before = path.read_bytes()
    output = f"{path}{suffix}"
    assert main(["summary", str(path), "-o", output, "--force-overwrite"]) == 2
    assert "is what is being read" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_an_output_inside_the_store_that_is_read_is_refused(built, tmp_path, capsys):
    store = nsan.import_trace(built(um()), tmp_path / "store")
    output = store / "manifest.json"
    assert main(["summary", str(store), "-o", str(output), "--force-overwrite"]) == 2
    assert "is what is being read" in capsys.readouterr().err
    assert nsan.summary(store)["migrations"]["n"] == 3


def test_a_result_that_cannot_be_written_leaves_the_old_one(built, tmp_path):
    path, output = built(um()), tmp_path / "out.json"
    output.write_text("old text")
    nsan.summary(path)
    script = 'ulimit -f 1; trap "" XFSZ; exec "$@"'
    command = [sys.executable, "-m", "nsan", "summary", str(path), "--json", "-o", str(output)]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command, "--force-overwrite"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 1
    assert "Cannot write the result" in done.stderr
    assert output.read_text() == "old text"
    assert [entry.name for entry in tmp_path.glob(".out*")] == []


@pytest.mark.parametrize("redirect", [">&-", "> /dev/full"])
def test_a_closed_or_full_stdout_is_an_error_without_a_traceback(built, redirect):
    path = built(um())
    nsan.summary(path)
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -m nsan summary "$1" {redirect}', sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("nsan: ")
    assert "Traceback" not in done.stderr


def test_a_part_of_zeros_is_a_broken_store(built, tmp_path, capsys):
    store = nsan.import_trace(built(um()), tmp_path / "store")
    part = next(store.glob("migrations/*.parquet"))
    part.write_bytes(bytes(part.stat().st_size))
    assert main(["migrations", str(store), "--filter-time", "0/20"]) == 1
    assert "not a usable nsan store" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"totals": {}}, {"info": None}, {"info": {"surprise": 1}}, {"tables": []}, {"source": None}],
)
def test_a_manifest_that_is_not_whole_is_a_broken_store(built, tmp_path, capsys, change):
    store = nsan.import_trace(built(um()), tmp_path / "store")
    manifest = store / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    assert main(["summary", str(store)]) == 1
    assert "not a usable nsan store" in capsys.readouterr().err


# Privacy of the profiler's own messages


@pytest.mark.parametrize(
    "text",
    [
        "CUDA: compiled with -I/srv/PRIVATE/inc",
        "CUDA error {/srv/PRIVATE/x}",
        "CUDA lost /home/alice",
        "CUDA lost buffers of alice@PRIVATE.corp",
        "CUDA option --token=PRIVATE was dropped",
        "Anything PRIVATE at all",
    ],
)
def test_messages_keep_no_person_option_or_folder(trace_of, text):
    row = {"timestamp": 1, "timestampType": 0, "source": 0, "severity": 3, "text": text}
    trace = trace_of(x.Export("2025.3.1").add("DIAGNOSTIC_EVENT", row))
    stored = trace.diagnostics.collect()["text"].item() or ""
    assert "PRIVATE" not in stored
    assert "alice" not in stored
