"""What an export says about people and machines goes neither into a store nor into a result."""

from __future__ import annotations

import zlib

import exports as x
import polars as pl
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

import nsan
from nsan.cli import main
from nsan.exports.private import without_folders
from nsan.schema import TABLES

PRIVATE = {
    "user": "PRIVATEuser",
    "host": "PRIVATEhost",
    "variable": "PRIVATEvariable",
    "value": "PRIVATEvalue",
    "command": "PRIVATEcommand",
    "folder": "PRIVATEfolder",
    "home": "PRIVATEhome",
    "input": "PRIVATEinput",
    "report": "PRIVATEreport",
    "other": "PRIVATEother",
    "uuid": "PRIVATEuuid",
    "bus": "PRIVATEbus",
    "module": "PRIVATEmodule",
    "source": "PRIVATEsource",
    "diagnostic": "PRIVATEdiagnostic",
    "windows": "PRIVATEwindows",
    "thread": "PRIVATEthread",
    "registered": "PRIVATEregistered",
}
PATHS = ("home", "module", "source")
"""Those that `--keep-paths` keeps."""


def pairs(**values):
    return [{"name": name, "value": value} for name, value in values.items()]


def secretive():
    """An export with a token of its own in every place that names a person or a machine."""
    p = PRIVATE
    export = x.Export("2025.5.1")
    export.strings |= {
        4: f"/home/{p['module']}/lib/libmine.so",
        5: f"/home/{p['source']}/src/main.cu",
        6: f"{p['registered']}=unused text of the capture",
    }
    export.add(
        "META_DATA_EXPORT",
        *pairs(
            EXPORT_PRODUCT_VERSION=export.version,
            EXPORT_SCHEMA_VERSION="3.22.0",
            EXPORT_PARAM_LAZY="true",
            EXPORT_PARAM_INPUT_PATH_ABS=f"/home/{p['input']}/a.nsys-rep",
            EXPORT_PARAM_OUTPUT_PATH=f"/home/{p['report']}/a.sqlite",
            EXPORT_HOST_NAME=p["host"],
        ),
    )
    export.add(
        "META_DATA_CAPTURE",
        *pairs(
            **{
                "PROCESS_0:COLLECT_UVM_GPU_PAGE_FAULTS": "true",
                "PROCESS_0:COLLECT_CUDA_TRACE": "true",
                f"PROCESS_0:ENVIRONMENT:{p['variable']}": p["value"],
                "PROCESS_0:COMMAND_LINE": f"./app --token={p['command']}",
                "PROCESS_0:WORKING_DIR": f"/home/{p['folder']}",
                "REPORT_FILE": f"/home/{p['report']}/r.nsys-rep",
            }
        ),
    )
    export.add(
        "TARGET_INFO_SYSTEM_ENV",
        *(
            {"devStateName": "S", "nameEnum": 0, "name": name, "value": value}
            for name, value in (
                ("Hostname", p["host"]),
                ("UserName", p["user"]),
                (p["variable"], p["value"]),
                ("CpuArchitecture", "x86_64"),
                ("CpuDescription", "Made-up CPU"),
                ("NvDriverVersion", "550.163.01"),
            )
        ),
    )
    export.add(
        "PROCESSES",
        {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": f"/home/{p['home']}/bin/trainer"},
        {"globalPid": x.global_pid(77), "pid": 77, "name": f"/usr/bin/{p['other']}"},
    )
    export.add(
        x.GPU,
        {
            "id": 0,
            "cuDevice": 0,
            "name": "NVIDIA A100",
            "chipName": "GA100",
            "uuid": p["uuid"],
            "busLocation": p["bus"],
        },
    )
    export.add(
        "DIAGNOSTIC_EVENT",
        *(
            {"timestamp": 1, "timestampType": 0, "source": 0, "severity": 3, "text": text}
            for text in (
                f"Cannot open /home/{p['diagnostic']}/app/config: events were lost",
                rf"Cannot open C:\Users\{p['windows']}\config",
            )
        ),
    )
    export.add("ThreadNames", {"nameId": 6, "globalTid": x.global_tid(x.PID, 1)})
    # The newest schema has the source line too.
    columns = ", ".join(f"{name} {kind}" for name, kind in export.columns(x.CPU_FAULTS).items())
    more = "sourceFile INTEGER, sourceLine INTEGER"
    export.tables = export.tables | {x.CPU_FAULTS: f"{columns}, {more}"}
    export.add(
        x.CPU_FAULTS,
        x.cpu_fault(5, function=3, module=4) | {"sourceFile": 5, "sourceLine": 12},
    )
    export.add(x.GPU_FAULTS, x.gpu_fault(0, 10, n=3))
    export.add(x.MEMCPY, x.migration(2, 8, 4096))
    export.add(x.KERNEL, x.kernel(0, 20))
    export.add(x.NVTX, x.nvtx(0, 20, "step"), x.nvtx(0, None, p["thread"], kind=39))
    export.add(x.MEMORY, x.memory_event(0, x.VA, 4096))
    return export


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("private")


@pytest.fixture(scope="module")
def export(place):
    return secretive().write(place / "capture.sqlite")


@pytest.fixture
def warm(monkeypatch, place, _own_cache):
    """Commands that only print may share one import."""
    monkeypatch.setenv("NSAN_CACHE_DIR", str(place / "cache"))


def texts_of(folder):
    """Everything readable in a store: names, raw bytes, and each string of each frame."""
    for path in folder.rglob("*"):
        yield str(path.relative_to(folder))
        if path.is_file():
            yield path.read_bytes().decode("latin-1")
            if path.suffix == ".parquet":
                frame = pl.read_parquet(path)
                for column in frame.get_columns():
                    yield from map(str, column.to_list())


def leaks(texts, allowed=()):
    whole = "\n".join(texts)
    return sorted(name for name, token in PRIVATE.items() if token in whole and name not in allowed)


def test_the_search_finds_what_an_export_holds(export, tmp_path):
    stored = export.read_bytes().decode("latin-1")
    assert {"user", "home", "uuid", "value", "module"} <= set(leaks([stored]))
    (tmp_path / "s").mkdir()
    pl.DataFrame({"a": ["x" * 1000 + PRIVATE["user"]] * 50}).write_parquet(tmp_path / "s/a.parquet")
    assert leaks(texts_of(tmp_path / "s")) == ["user"]


def test_a_store_holds_no_private_text(export, tmp_path):
    folder = nsan.import_trace(export, tmp_path / "store")
    texts = list(texts_of(folder))
    assert leaks(texts) == []
    assert any("libmine.so" in text for text in texts)  # the last part of a path is kept


def test_the_store_in_the_cache_holds_no_private_text(export, tmp_path):
    nsan.summary(export)
    texts = list(texts_of(tmp_path / "cache"))
    assert len(texts) > 10
    assert leaks(texts) == []


COMMANDS = {
    "summary": ["summary", "TRACE"],
    "summary -v": ["summary", "TRACE", "-v"],
    "filtered": ["summary", "TRACE", "--filter-time", "0/5", "--filter-nvtx", "step"],
    "info": ["info", "TRACE"],
    "info -v": ["info", "TRACE", "-v"],
    "migrations": ["migrations", "TRACE"],
    "faults": ["faults", "TRACE", "-v"],
}


@pytest.mark.parametrize("form", ["table", "markdown", "csv", "json"])
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("warm")
def test_no_command_prints_private_text(export, capfd, name, form):
    arguments = [str(export) if part == "TRACE" else part for part in COMMANDS[name]]
    assert main([*arguments, "--format", form]) == 0
    captured = capfd.readouterr()
    assert captured.out
    assert leaks([captured.out, captured.err]) == []


def test_messages_hold_no_private_text(export, capfd):
    assert main(["summary", str(export), "--pid", "77"]) == 2
    assert main(["summary", str(export), "--filter-nvtx", "none"]) == 2
    assert leaks(capfd.readouterr()) == []


def test_parquet_holds_no_private_text(export, tmp_path):
    for command in ("migrations", "faults"):
        out = tmp_path / "out" / f"{command}.parquet"
        out.parent.mkdir(exist_ok=True)
        main([command, str(export), "--format", "parquet", "-o", str(out), "-q"])
    assert leaks(texts_of(tmp_path / "out")) == []


def test_processes_without_events_are_not_listed(export):
    processes = nsan.summary(export)["processes"]
    assert processes == [{"pid": x.PID, "name": "trainer"}]


def test_a_profiler_message_does_not_list_its_process(tmp_path):
    row = {"timestamp": 1, "timestampType": 0, "source": 0, "severity": 3, "text": "x"}
    export = x.Export("2025.5.1").add("DIAGNOSTIC_EVENT", row | {"globalPid": x.global_pid(77)})
    export.add("PROCESSES", {"globalPid": x.global_pid(77), "pid": 77, "name": "/usr/bin/secret"})
    assert nsan.summary(export.write(tmp_path / "a.sqlite"))["processes"] == []


def test_paths_are_kept_on_demand_and_nothing_else(export, tmp_path):
    assert main(["import", str(export), "-o", str(tmp_path / "store"), "--keep-paths"]) == 0
    texts = list(texts_of(tmp_path / "store"))
    assert leaks(texts, allowed=PATHS) == []
    assert leaks(texts) == sorted(PATHS)
    trace = nsan.open_trace(tmp_path / "store")
    [fault] = trace.cpu_faults.collect().to_dicts()
    assert fault["module"] == f"/home/{PRIVATE['module']}/lib/libmine.so"
    assert fault["source_file"] == f"/home/{PRIVATE['source']}/src/main.cu"


def test_a_store_with_paths_is_not_taken_for_one_without(export, tmp_path):
    nsan.import_trace(export, keep_paths=True)
    nsan.summary(export)
    assert leaks(texts_of(tmp_path / "cache")) == []


@pytest.mark.parametrize(
    "path",
    [
        "/srv/PRIVATEhome/bin/app",
        "C:\\Users\\PRIVATEhome\\app.exe",
        "~PRIVATEhome/app",
        "../PRIVATEhome/app",
        "PRIVATEhome/app",
        "/srv/PRIVATEhome x/app",
        "/srv/PRIVATEhome/bin/",
        "/srv/PRIVATEhome\nx/app",
    ],
    ids=repr,
)
def test_a_path_of_any_form_is_cut_to_its_last_part(tmp_path, path):
    export = x.Export().add(x.KERNEL, x.kernel(0, 1))
    export.strings |= {4: path}
    export.add(x.CPU_FAULTS, x.cpu_fault(0, module=4))
    export.add("PROCESSES", {"globalPid": x.global_pid(x.PID), "pid": x.PID, "name": path})
    folder = nsan.import_trace(export.write(tmp_path / "a.sqlite"), tmp_path / "store")
    assert leaks(texts_of(folder)) == []


@pytest.mark.parametrize(
    "text",
    [
        "Cannot open /srv/PRIVATEuser/app/a.out.",
        "Cannot open '/srv/PRIVATEuser/a.out' now",
        'Cannot open "/srv/PRIVATEuser/a.out"',
        "Cannot open '/srv/PRIVATEuser x/app/a.out'",
        "Cannot open C:\\Users\\PRIVATEuser\\a.exe",
        "Cannot open ~/PRIVATEuser/a.out",
        "Path=/srv/PRIVATEuser/a.out;",
        "Cannot open file:///srv/PRIVATEuser/a.out",
    ],
    ids=repr,
)
def test_a_message_of_the_profiler_has_its_paths_cut(tmp_path, text):
    row = {"timestamp": 1, "timestampType": 0, "source": 0, "severity": 3, "text": text}
    export = x.Export("2025.5.1").add("DIAGNOSTIC_EVENT", row)
    folder = nsan.import_trace(export.write(tmp_path / "a.sqlite"), tmp_path / "store")
    assert leaks(texts_of(folder)) == []


@pytest.mark.parametrize("form", ["perfetto", "parquet", "csv"])
def test_nothing_private_leaves_for_other_programs(export, tmp_path, form, capfd):
    # Even from a store that keeps whole paths.
    store = nsan.import_trace(export, tmp_path / "store", keep_paths=True)
    place = tmp_path / "out" / "export"
    place.parent.mkdir()
    more = [] if form == "perfetto" else ["--analyses", "faults_by_function"]
    assert main(["export", str(store), "--to", form, "-o", str(place), *more]) == 0
    texts = [*texts_of(place.parent), *capfd.readouterr()]
    if form == "perfetto":
        packed = [
            packet.compressed_packets for packet in Trace.FromString(place.read_bytes()).packet
        ]
        texts = [zlib.decompress(each).decode("latin-1") for each in packed]
        assert "trainer" in texts[0]
    assert "libmine.so" in "".join(texts)
    assert leaks(texts) == []


def test_a_time_window_hides_no_folder(export, tmp_path):
    whole = nsan.open_trace(nsan.import_trace(export, tmp_path / "store", keep_paths=True))
    part = without_folders(whole.filter(time=(0, 20)))
    for trace in (part, part.unwindowed):
        assert leaks(str(getattr(trace, name).collect().to_dict()) for name in TABLES) == []
        assert trace.cpu_faults.collect()["module"].to_list() == ["libmine.so"]
