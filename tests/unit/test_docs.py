"""The reference pages under docs/ are printed from the code: that they are current, and that the code says all."""

from __future__ import annotations

import json
import runpy
from collections import Counter

import exports as x
import pytest

import nsan
from nsan.cli import main
from nsan.contract_keys import ANALYSIS_KEYS, RECORDING_KEYS, SUMMARY_KEYS, keys_in
from nsan.io.recording import Recording

SAMPLES = x.REPOSITORY / "sample_data"
REAL = SAMPLES / "um_vector_add_rtx4060l.sqlite"
JOINED = SAMPLES / "model" / "pca_on"


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(x.REPOSITORY / "docs" / "generate.py"))


def test_the_pages_are_what_the_code_says_now(generator, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # a narrow terminal changes nothing
    made = generator["pages"]()
    assert set(made) == {"columns.md", "commands.md", "json.md"}
    old = [
        name
        for name, text in made.items()
        if (x.REPOSITORY / "docs" / name).read_text(encoding="utf-8") != text
    ]
    assert not old, f"{', '.join(old)}: run make docs"


def test_every_link_within_a_page_leads_to_one_heading(generator):
    for name, text in generator["pages"]().items():
        lines = text.splitlines()
        headings = Counter(
            line.lstrip("# ").replace(" ", "-") for line in lines if line.startswith("##")
        )
        links = {part.partition(")")[0] for part in text.split("](#")[1:]}
        assert links or name == "json.md"
        assert {link: headings[link] for link in links} == dict.fromkeys(links, 1)


# --- The keys of the JSON contract ----------------------------------------------------------------


def differences(keys, documents):
    """Compare declared keys with those of documents, both ways, and their types."""
    declared = {key.path: key for key in keys}
    found = {pair for document in documents for pair in keys_in(document)}
    wrong = [
        f"declared twice: {path}" for path, n in Counter(k.path for k in keys).items() if n > 1
    ]
    wrong += [f"not declared: {path}" for path in {path for path, _ in found} - set(declared)]
    wrong += [f"in no document: {path}" for path in set(declared) - {path for path, _ in found}]
    for path, kind in ((path, kind) for path, kind in found if path in declared):
        key = declared[path]
        whole = key.type == "number" and kind == "integer"
        fits = key.null if kind is None else kind == key.type or whole or key.type == "any"
        if not fits:
            wrong.append(f"{path} is {kind}")
    return wrong


def test_every_key_of_a_summary_is_documented_and_every_documented_key_is_there(summary_of):
    captures = (
        REAL,
        SAMPLES / "nvprof_hotspot_v100_1024.log.gz",  # measures against ping-pong
        SAMPLES / "model" / "two_gpus" / "two_gpus.sqlite",
    )
    window = nsan.open_trace(REAL).filter(time="265ms/268ms")
    documents = [nsan.summary(trace) for trace in (*captures, window)]
    documents.append(summary_of(x.Export()))  # nothing was recorded
    # Nor are sizes, places and durations known here.
    unread = x.migration(1, 2, 4096) | {"bytes": None, "virtualAddress": None, "start": None}
    documents.append(summary_of(x.Export().add(x.MEMCPY, unread)))
    assert differences(SUMMARY_KEYS, documents) == []


def test_what_a_recording_adds_is_documented(tmp_path):
    recording = Recording(
        report=tmp_path / "run.nsys-rep",
        facts=tmp_path / "run.nsan.json",
        seconds_alone=None,
        seconds_nsys=2.5,
        status_alone=None,
        status_recorded=0,
        options=("--trace=cuda",),
        nsys_version="2023.4.4",
        driver_version=None,
        uvm_parameters={"uvm_perf_fault_batch_count": "256"},
    )
    written = json.dumps({"recording": recording.to_dict()})
    assert differences(RECORDING_KEYS, [json.loads(written)]) == []


def test_the_keys_of_an_analysis_are_documented_for_every_kind_of_source(capsys):
    snapshot = str(JOINED / "snapshot.pickle")
    documents = []
    for command in (
        ["analyse", "batches", str(REAL), "--filter-time", "265ms/268ms"],
        ["analyse", "traffic_over_time", str(REAL)],
        ["allocator", snapshot, "--by", "pool"],
        ["allocator", str(JOINED / "pca_on.sqlite"), "--snapshot", snapshot, "--by", "state"],
    ):
        assert main([*command, "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert differences(ANALYSIS_KEYS, documents) == []
