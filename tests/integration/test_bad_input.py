"""Files that are not exports, damaged ones, and imports that are cut off."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import exports as x
import pytest
from conftest import SOAK
from fake_nsys import fake

import nsan
from nsan.cli import main
from nsan.errors import BrokenStoreError
from nsan.io.manifest import STORE_FORMAT, default_store, fingerprint, read_manifest

BYTES = 4096


def good(path, *, n=3, size=BYTES):
    export = x.Export().add(x.MEMCPY, *(x.migration(i * 10, i * 10 + 5, size) for i in range(n)))
    return export.write(path)


def migrated(path):
    return nsan.summary(path)["migrations"]["bytes"]


def contents(folder):
    """Names, sizes, times and content of all below a folder."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
    }


def store_at(path):
    return default_store(path, fingerprint(path))


def cached(tmp_path):
    """All that the cache holds: finished stores, and anything half-written."""
    return [path.name for path in (tmp_path / "cache").glob("stores/*")]


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    return folder


@pytest.fixture
def refused(inputs, tmp_path, capsys):
    """Run a command that must fail cleanly; return its message."""

    def run(path, *more):
        before = contents(inputs)
        status = main([*more, str(path)])
        out, err = capsys.readouterr()
        assert status == 1, err
        assert out == ""
        assert err.startswith("nsan: ")
        assert "Traceback" not in err
        assert contents(inputs) == before
        assert cached(tmp_path) == []
        return err

    return run


# What is not an export


def make(path, raw):
    path.write_bytes(raw)
    return path


NOT_EXPORTS = {
    "text": ("a.sqlite", b"start,end,bytes\n" * 99, "not a SQLite database", "nsys export"),
    "short text": ("a.sqlite", b"x", "not a SQLite database", "nsys export"),
    "empty": ("a.sqlite", b"", "an empty file", "do it again"),
    "gzip": ("a.sqlite.gz", gzip.compress(b"SQLite"), "gzip data", "gunzip"),
    "zip": ("a.zip", b"PK\x03\x04" + bytes(99), "a zip archive", "Unpack"),
    "report": ("a.nsys-rep", b"\x00\x01report" * 99, "is not an nsys report", "nsys profile"),
    "old report": ("a.qdrep", b"\x00\x01report" * 99, "is not an nsys report", "nsys profile"),
    "parquet": ("a.parquet", b"PAR1" + bytes(99), "one Parquet file", "folder of the whole"),
    "pickle": ("a.pickle", b"\x80\x04" + bytes(99), "a pickle", "nsan allocator FILE"),
}


@pytest.mark.parametrize("case", NOT_EXPORTS)
def test_what_is_not_a_capture_is_named_with_the_way_out(
    case, inputs, refused, tmp_path, monkeypatch
):
    says = "Exportation error: Version tag is not found in the stream."
    monkeypatch.setenv("NSYS", str(fake(tmp_path / "nsys", status=1, says=says).program))
    name, raw, what, way_out = NOT_EXPORTS[case]
    message = refused(make(inputs / name, raw))
    assert what in message
    assert way_out in message


@pytest.mark.parametrize("command", ["info", "summary", "migrations", "faults", "import"])
def test_every_command_refuses_alike(command, inputs, refused):
    assert "an empty file" in refused(make(inputs / "a.sqlite", b""), command)


@pytest.mark.parametrize("keep", [lambda size: size // 2, lambda _: 50, lambda size: size - 1])
def test_a_database_that_is_cut_short_is_named_so(keep, inputs, refused):
    path = good(inputs / "a.sqlite", n=2000)
    raw = path.read_bytes()
    message = refused(make(path, raw[: keep(len(raw))]))
    assert "damaged" in message
    assert "cut short" in message
    assert "nsys export" in message


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        (["users", "orders"], "something else (tables: orders, users)"),
        ([], "something else (tables: none)"),
        (["CUPTI_ACTIVITY_KIND_UNIFIED_MEMORY_COUNTER", "StringTable"], "nvprof"),
    ],
)
def test_a_database_of_another_program_is_named_so(tables, what, inputs, refused):
    path = inputs / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        for table in tables:
            connection.execute(f"CREATE TABLE {table} (a, b)")
        connection.execute("PRAGMA user_version = 1")  # so that there is a file at all
        connection.commit()
    message = refused(path)
    assert what in message
    assert "nsys export" in message


@pytest.mark.parametrize("what", ["middle of a table", "schema page", "every page but the first"])
def test_a_corrupt_page_is_an_error_not_a_smaller_total(what, inputs, refused):
    path = good(inputs / "a.sqlite", n=5000)
    raw = bytearray(path.read_bytes())
    page = int.from_bytes(raw[16:18], "big")
    at = {"middle of a table": len(raw) // page // 2 * page, "schema page": 100}.get(what, page)
    end = at + page if what == "middle of a table" else len(raw) if "every" in what else page
    raw[at:end] = b"\xa5" * (end - at)
    message = refused(make(path, bytes(raw)))
    assert "damaged" in message
    assert "nsys export" in message


def test_a_missing_path_is_named(inputs, refused):
    message = refused(inputs / "nothing.sqlite")
    assert "nothing.sqlite: no such file or folder" in message
    assert list(inputs.iterdir()) == []


def test_a_folder_without_a_store_or_a_capture_is_refused(inputs, refused):
    (inputs / "a.txt").write_text("nothing of nsys")
    assert "not an nsan store" in refused(inputs)


def test_importing_a_folder_is_refused(inputs, refused):
    folder = inputs / "folder"
    folder.mkdir()
    assert "folder" in refused(folder, "import")


def test_a_fifo_is_refused_without_waiting_for_a_writer(inputs):
    path = inputs / "a.sqlite"
    os.mkfifo(path)
    done = subprocess.run(
        [sys.executable, "-m", "nsan", path],
        capture_output=True,
        text=True,
        timeout=8,
        check=False,
    )
    assert done.returncode == 1
    assert "not a regular file" in done.stderr


@pytest.fixture
def open_folder():
    """A folder that other users may enter; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="nsan-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def without_privileges(path, cache):
    """Run the command line as a user whom permissions hold back."""
    run = [sys.executable, "-m", "nsan", str(path)]
    if os.getuid() == 0:
        run = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *run]
    env = os.environ | {"NSAN_CACHE_DIR": str(cache)}
    return subprocess.run(run, capture_output=True, text=True, env=env, timeout=60, check=False)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_may_not_be_read_is_named(what, open_folder):
    inputs = open_folder / "inputs"
    inputs.mkdir()
    path = good(inputs / "a.sqlite")
    (path if what == "file" else inputs).chmod(0o000)
    done = without_privileges(path, open_folder / "nowhere")
    inputs.chmod(0o755)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "you may not read" in done.stderr


def test_a_cache_that_may_not_be_written_is_named(open_folder):
    path = good(open_folder / "a.sqlite")
    place = open_folder / "locked"
    place.mkdir(mode=0o555)
    done = without_privileges(path, place)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
    assert "NSAN_CACHE_DIR" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(place.iterdir()) == []


# Files that are fine, though odd


def test_a_newer_schema_is_read(inputs, capsys):
    path = good(inputs / "a.sqlite")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "UPDATE META_DATA_EXPORT SET value = '9.0.0' WHERE name = 'EXPORT_SCHEMA_VERSION'"
        )
        connection.commit()
    assert main([str(path)]) == 0
    assert "9.0.0" in capsys.readouterr().out


def test_a_capture_without_cuda_exits_with_three_and_a_word(inputs, capsys):
    export = x.Export().add(x.NVTX, x.nvtx(0, 10, "a"))
    path = export.write(inputs / "a.sqlite")
    before = contents(inputs)
    assert main([str(path)]) == 3
    out, err = capsys.readouterr()
    assert "No GPU activity was recorded" in out + err
    assert "no Unified Memory data" in err.replace("\n", " ")
    assert contents(inputs) == before


def test_a_real_capture_without_cuda_exits_with_three(real, capsys):
    assert main([str(real("nocuda_easycuda_2023.4.4"))]) == 3
    assert "Unified Memory" in capsys.readouterr().err


def test_a_file_that_may_not_be_written_is_read(inputs):
    path = good(inputs / "a.sqlite")
    path.chmod(0o444)
    inputs.chmod(0o555)
    try:
        assert migrated(path) == 3 * BYTES
    finally:
        inputs.chmod(0o755)


def test_a_link_is_followed(inputs):
    good(inputs / "a.sqlite")
    (inputs / "link.sqlite").symlink_to("a.sqlite")
    assert migrated(inputs / "link.sqlite") == 3 * BYTES


# Logs beside the database


def with_wal(target):
    """Copy a database and its log while a writer still holds two rows in the log."""
    source = good(target.with_name("writer.sqlite"))
    with closing(sqlite3.connect(source)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA wal_autocheckpoint = 0")
        for start in (100, 200):
            writer.execute(
                f"INSERT INTO {x.MEMCPY} SELECT * FROM {x.MEMCPY} WHERE start = 0 LIMIT 1"
            )
            writer.execute(
                f"UPDATE {x.MEMCPY} SET start = ? WHERE rowid = last_insert_rowid()", [start]
            )
        writer.commit()
        for suffix in ("", "-wal"):
            Path(f"{target}{suffix}").write_bytes(Path(f"{source}{suffix}").read_bytes())
    source.unlink()
    return target


def test_rows_that_are_only_in_the_log_are_read_and_nothing_changes(inputs):
    path = with_wal(inputs / "a b.sqlite")
    assert Path(f"{path}-wal").stat().st_size > 0
    assert x.ask(path, f"SELECT count(*) FROM {x.MEMCPY}") == [(3,)]  # without its log
    before = contents(inputs)
    assert migrated(path) == 5 * BYTES
    assert nsan.open_trace(path).migrations.collect().height == 5
    assert contents(inputs) == before
    assert sorted(before) == ["a b.sqlite", "a b.sqlite-wal"]


def test_the_log_of_the_target_of_a_link_is_read(inputs):
    path = with_wal(inputs / "a.sqlite")
    (inputs / "link.sqlite").symlink_to(path)
    assert migrated(inputs / "link.sqlite") == 5 * BYTES


def test_an_empty_log_is_no_log(inputs):
    path = good(inputs / "a.sqlite")
    Path(f"{path}-wal").touch()
    before = contents(inputs)
    assert migrated(path) == 3 * BYTES
    assert contents(inputs) == before


def test_a_log_that_comes_later_makes_the_store_anew(inputs):
    path = with_wal(inputs / "a.sqlite")
    log = Path(f"{path}-wal")
    raw = log.read_bytes()
    log.unlink()
    assert migrated(path) == 3 * BYTES
    log.write_bytes(raw)
    assert migrated(path) == 5 * BYTES


def test_an_unfinished_transaction_is_rolled_back_on_a_copy(inputs):
    # A writer that died: half-written rows in the file, the old pages in its journal.
    source = good(inputs / "writer.sqlite", n=2000)
    with closing(sqlite3.connect(source, isolation_level=None)) as writer:
        writer.execute("PRAGMA cache_size = 1")
        writer.execute("PRAGMA cache_spill = 1")
        writer.execute("BEGIN")
        writer.execute(f"UPDATE {x.MEMCPY} SET bytes = 1")
        path = inputs / "a.sqlite"
        for suffix in ("", "-journal"):
            Path(f"{path}{suffix}").write_bytes(Path(f"{source}{suffix}").read_bytes())
        writer.execute("ROLLBACK")
    source.unlink()
    assert x.ask(path, f"SELECT count(*) FROM {x.MEMCPY} WHERE bytes = 1")[0][0] > 0
    before = contents(inputs)
    assert migrated(path) == 2000 * BYTES
    assert contents(inputs) == before
    assert sorted(before) == ["a.sqlite", "a.sqlite-journal"]


# Stores


def test_a_store_is_used_again_while_its_source_is_unchanged(inputs):
    path = good(inputs / "a.sqlite")
    manifest = store_at(path) / "manifest.json"
    nsan.summary(path)
    made = manifest.stat()
    assert migrated(path) == 3 * BYTES
    nsan.open_trace(path)
    nsan.import_trace(path)
    assert (manifest.stat().st_mtime_ns, manifest.stat().st_ino) == (made.st_mtime_ns, made.st_ino)


def test_a_store_is_made_again_when_only_the_change_counter_differs(inputs):
    path = good(inputs / "a.sqlite")
    before = path.stat()
    assert migrated(path) == 3 * BYTES
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {x.MEMCPY} SET bytes = 8192")
        connection.commit()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert migrated(path) == 3 * 8192


def test_a_change_in_the_middle_of_a_big_file_is_seen_by_its_change_counter(inputs):
    path = good(inputs / "a.sqlite", n=5000)
    before = path.stat()
    assert before.st_size > 3 << 16
    assert migrated(path) == 5000 * BYTES
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE {x.MEMCPY} SET bytes = 8192 WHERE rowid = 2500")
        connection.commit()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert migrated(path) == 5001 * BYTES


def test_two_files_of_one_name_have_two_stores(inputs):
    (inputs / "one").mkdir()
    (inputs / "two").mkdir()
    one, two = good(inputs / "one" / "a.sqlite"), good(inputs / "two" / "a.sqlite", n=7)
    assert (migrated(one), migrated(two), migrated(one)) == (3 * BYTES, 7 * BYTES, 3 * BYTES)


DAMAGES = {
    "a part is missing": lambda store: next(store.glob("migrations/*.parquet")).unlink(),
    "a part is cut short": lambda store: os.truncate(next(store.glob("migrations/*.parquet")), 60),
    "the manifest is garbage": lambda store: (store / "manifest.json").write_text("{garbage"),
    "the manifest is binary": lambda store: (store / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "the manifest is empty": lambda store: (store / "manifest.json").write_text(""),
    "the manifest is a list": lambda store: (store / "manifest.json").write_text("[1]"),
    "the manifest lacks its tables": lambda store: (store / "manifest.json").write_text(
        f'{{"store_format": {STORE_FORMAT}}}'
    ),
    "the manifest is of another format": lambda store: (store / "manifest.json").write_text(
        (store / "manifest.json")
        .read_text()
        .replace(f'"store_format": {STORE_FORMAT}', '"store_format": 999')
    ),
    "the totals are gone": lambda store: _edit(store, lambda m: m.pop("totals")),
}


def _edit(store, change):
    manifest = json.loads((store / "manifest.json").read_text())
    change(manifest)
    (store / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_says_how_to_make_it_again(damage, inputs, tmp_path, capsys):
    store = nsan.import_trace(good(inputs / "a.sqlite"), tmp_path / "store")
    DAMAGES[damage](store)
    for command in ("summary", "info"):
        assert main([command, str(store)]) == 1
        err = capsys.readouterr().err
        assert "not a usable nsan store" in err
        assert f"nsan import FILE -o {store} --force-overwrite" in err


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_in_the_cache_is_made_again(damage, inputs, tmp_path, capsys):
    path = good(inputs / "a.sqlite")
    nsan.summary(path)
    DAMAGES[damage](store_at(path))
    assert main(["summary", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["migrations"]["bytes"] == 3 * BYTES
    assert "Traceback" not in err
    assert nsan.open_trace(path).migrations.collect().height == 3
    assert cached(tmp_path) == [store_at(path).name]


def test_a_store_whose_manifest_lacks_a_table_is_named_broken(inputs, tmp_path):
    store = nsan.import_trace(good(inputs / "a.sqlite"), tmp_path / "store")
    _edit(store, lambda manifest: manifest["tables"].pop("kernels"))
    with pytest.raises(BrokenStoreError, match="not a usable nsan store"):
        nsan.open_trace(store)


def test_a_damaged_store_is_made_again_with_the_named_option(inputs, tmp_path, capsys):
    path, store = good(inputs / "a.sqlite"), tmp_path / "store"
    nsan.import_trace(path, store)
    (store / "manifest.json").write_text("{garbage")
    assert main(["import", str(path), "-o", str(store), "--force-overwrite", "-q"]) == 0
    assert capsys.readouterr().out == f"{store}\n"
    assert migrated(store) == 3 * BYTES


@pytest.mark.parametrize("what", ["folder", "file", "store"])
def test_an_import_over_something_else_names_the_way_out(what, inputs, tmp_path, capsys):
    place = tmp_path / "place"
    if what == "file":
        place.write_text("mine")
    elif what == "folder":
        place.mkdir()
        (place / "notes.txt").write_text("mine")
    else:
        nsan.import_trace(good(inputs / "other.sqlite", n=9), place)
    before = contents(tmp_path)
    path = good(inputs / "a.sqlite")
    assert main(["import", str(path), "-o", str(place)]) == 1
    err = capsys.readouterr().err
    way_out = "--force-overwrite" if what == "store" else "another place"
    assert way_out in err
    assert {k: v for k, v in contents(tmp_path).items() if "inputs" not in k} == {
        k: v for k, v in before.items() if "inputs" not in k
    }
    forced = main(["import", str(path), "-o", str(place), "--force-overwrite", "-q"])
    if what == "store":
        assert forced == 0
        assert migrated(place) == 3 * BYTES
    else:  # what is not a store is never overwritten
        assert forced == 1
        assert (place if what == "file" else place / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".place*"))


def test_an_empty_folder_is_a_place_for_a_store(inputs, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    assert migrated(nsan.import_trace(good(inputs / "a.sqlite"), place)) == 3 * BYTES


def test_a_failed_import_keeps_the_old_store(inputs, tmp_path, capsys):
    path = good(inputs / "a.sqlite", n=5000)
    store = nsan.import_trace(path, tmp_path / "store")
    raw = bytearray(path.read_bytes())
    half = len(raw) // 2 // 4096 * 4096
    raw[half : half + 4096] = b"\xa5" * 4096
    path.write_bytes(bytes(raw))
    assert main(["import", str(path), "-o", str(store)]) == 1
    assert "damaged" in capsys.readouterr().err
    assert migrated(store) == 5000 * BYTES
    assert [entry.name for entry in tmp_path.iterdir() if "store" in entry.name] == ["store"]


# No room


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk, keep):
    free = os.statvfs(disk)
    with contextlib.suppress(OSError):
        (disk / "filler").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - keep)))


@pytest.mark.parametrize("keep", [0, 8_192, 40_000, 70_000])
def test_a_full_disk_is_an_error_that_leaves_nothing_behind(
    keep, inputs, small_disk, monkeypatch, capsys
):
    monkeypatch.setenv("NSAN_CACHE_DIR", str(small_disk))
    path = good(inputs / "a.sqlite")
    assert migrated(path) == 3 * BYTES
    store = store_at(path)
    old = contents(store)
    # Incompressible, so that the new store cannot fit.
    export = x.Export().add(
        x.MEMCPY,
        *(
            x.migration(i * 977, i * 977 + hash((i, 1)) % 900, 4096, hash((i, 2)) % (1 << 47))
            for i in range(8000)
        ),
    )
    path.unlink()
    export.write(path)
    fill(small_disk, keep)
    assert main([str(path)]) == 1
    err = capsys.readouterr().err
    assert "No space left on device" in err
    assert "NSAN_CACHE_DIR" in err
    assert "Traceback" not in err
    assert contents(store) == old
    assert migrated(store) == 3 * BYTES
    assert [entry.name for entry in store.parent.iterdir()] == [store.name]


# Imports that are cut off


def big(path, *, n, size=BYTES):
    """An export whose import takes a while."""
    good(path, n=1, size=size)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(f"DELETE FROM {x.MEMCPY}")
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({x.MEMCPY})")]
        made = {"start": "i * 7", '"end"': "i * 7 + 5", "bytes": size, "copyKind": 11}
        made |= {
            "migrationCause": 2,
            "virtualAddress": "i * 4096",
            "globalPid": x.global_pid(x.PID),
        }
        made |= {"deviceId": 0, "contextId": 0, "streamId": 0}
        assert {name.strip('"') for name in made} <= set(columns)
        connection.execute(
            f"INSERT INTO {x.MEMCPY} ({', '.join(made)}) WITH RECURSIVE n(i) AS "
            f"(SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {n - 1}) "
            f"SELECT {', '.join(map(str, made.values()))} FROM n"
        )
        connection.commit()
    return path


N_BIG = 100_000


@pytest.fixture(scope="module")
def big_inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big")
    return big(folder / "old.sqlite", n=N_BIG), big(folder / "new.sqlite", n=N_BIG, size=8192)


def leftovers(store):
    return sorted(entry.name for entry in store.parent.iterdir() if ".importing-" in entry.name)


def importing(path, store):
    return subprocess.Popen(
        [sys.executable, "-m", "nsan", "import", str(path), "-o", str(store), "--force-overwrite"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_until_building(store, process):
    for _ in range(30_000):
        if leftovers(store) or process.poll() is not None:
            return
        time.sleep(0.002)


MOMENTS_S = [i * 0.03 for i in range(20)] if SOAK else [0.0, 0.05, 0.15]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_import_leaves_the_old_store_or_the_new_one(number, big_inputs, tmp_path):
    old, new = big_inputs
    store = nsan.import_trace(old, tmp_path / "stores" / "store")
    killed = 0
    for moment in MOMENTS_S:
        process = importing(new, store)
        _wait_until_building(store, process)
        time.sleep(moment)
        process.send_signal(number)
        status = process.wait(60)
        err = process.stderr.read()
        process.stderr.close()
        assert "Traceback" not in err, f"{number!r} after {moment} s"
        assert status in (0, -number, 128 + number), err
        killed += status != 0
        trace = nsan.open_trace(store)
        sizes = trace.migrations.select("bytes").unique().collect()["bytes"].to_list()
        assert sizes in ([BYTES], [8192]), f"{number!r} after {moment} s"
        assert trace.migrations.collect().height == N_BIG
        assert migrated(store) == N_BIG * sizes[0]
        if number != signal.SIGKILL:
            assert leftovers(store) == [], f"{number!r} after {moment} s"
    assert killed, "every import was over before it was to be killed"


def test_what_a_killed_import_left_is_swept_by_the_next(big_inputs, inputs, tmp_path):
    store = tmp_path / "stores" / "store"
    store.parent.mkdir()
    process = importing(big_inputs[1], store)
    _wait_until_building(store, process)
    process.kill()
    process.wait(60)
    process.stderr.close()
    assert len(leftovers(store)) == 1
    assert not store.exists()
    # That of a process that still runs, and that of another store, stay.
    (store.parent / f".store.importing-{os.getpid()}-abc").mkdir()
    (store.parent / ".other.importing-999999999-abc").mkdir()
    nsan.import_trace(good(inputs / "a.sqlite"), store)
    assert migrated(store) == 3 * BYTES
    assert leftovers(store) == [
        ".other.importing-999999999-abc",
        f".store.importing-{os.getpid()}-abc",
    ]


def test_a_name_with_wildcards_sweeps_only_its_own(inputs, tmp_path):
    (tmp_path / ".a.importing-999999999-abc").mkdir()
    nsan.import_trace(good(inputs / "a.sqlite"), tmp_path / "[ab]*")
    assert (tmp_path / ".a.importing-999999999-abc").is_dir()


def test_two_imports_of_one_file_at_once_both_succeed(big_inputs, tmp_path):
    store = tmp_path / "stores" / "store"
    both = [importing(big_inputs[0], store) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert migrated(store) == N_BIG * BYTES
    assert leftovers(store) == []
    assert [entry.name for entry in store.parent.iterdir()] == ["store"]


def test_two_summaries_of_a_new_file_at_once_both_succeed(big_inputs, tmp_path):
    command = [sys.executable, "-m", "nsan", "summary", str(big_inputs[0]), "--json"]
    env = os.environ | {"NSAN_CACHE_DIR": str(tmp_path / "cache")}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    texts = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [json.loads(text)["migrations"]["bytes"] for text in texts] == [N_BIG * BYTES] * 2
    assert cached(tmp_path) == [store_at(big_inputs[0]).name]


def test_a_store_names_its_source_and_every_part(inputs, tmp_path):
    store = nsan.import_trace(good(inputs / "a.sqlite"), tmp_path / "store")
    manifest = read_manifest(store)
    assert manifest["source"]["name"] == "a.sqlite"
    listed = {
        f"{name}/{part['name']}"
        for name, table in manifest["tables"].items()
        for part in table["parts"]
    }
    assert listed == {str(path.relative_to(store)) for path in store.rglob("*.parquet")}
