"""What the keys of the JSON contract mean, beside :mod:`nsan.contract`, which writes them.

A test compares these lists with real documents, both ways. `docs/json.md` is printed from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

JsonType = Literal["integer", "number", "text", "flag", "object", "list", "any"]

_TYPES: Final[dict[type, JsonType]] = {
    bool: "flag",
    int: "integer",
    float: "number",
    str: "text",
    dict: "object",
    list: "list",
}

MAPS: Final = {
    "gpu_faults.by_access": "access",
    "migrations.by_cause": "cause",
    "driver_events": "event",
    "recording.uvm_parameters": "parameter",
    "options": "option",
    "rows[]": "column",
    "filters": "filter",
    "record": "figure",
    "advice[].rows[].options": "option",
    "advice[].rows[].rows[]": "column",
    "runs[].figures": "figure",
}
"""Objects whose keys come from the trace or the analysis, and what a key is."""


@dataclass(frozen=True)
class Key:
    """One key: ``path`` from the top, ``[]`` for the entries of a list, ``<cause>`` for keys from data."""

    path: str
    type: JsonType
    unit: str
    doc: str
    null: bool = False
    """Null where it was not recorded, not kept by this kind of source, or could not be read."""


def keys_in(document: dict[str, Any]) -> Iterator[tuple[str, JsonType | None]]:
    """List every key that a document has, by its path, with the type of its value.

    Parameters
    ----------
    document : dict
        Of `nsan summary --json`, `nsan record --json` or `nsan analyse --json`.

    Returns
    -------
    iterator of (str, str or None)
        A path comes as often as it has values; the type of null is None.

    Examples
    --------
    >>> list(keys_in({"devices": [{"pid": None}]}))
    [('devices', 'list'), ('devices[]', 'object'), ('devices[].pid', None)]
    """
    yield from _inside(document, "")


def _inside(value: Any, path: str) -> Iterator[tuple[str, JsonType | None]]:
    if path:
        yield path, _TYPES.get(type(value))
    if isinstance(value, list):
        for item in value:
            yield from _inside(item, f"{path}[]")
    elif isinstance(value, dict):
        named = MAPS.get(path)
        for key, item in value.items():
            step = key if named is None else f"<{named}>"
            yield from _inside(item, f"{path}.{step}" if path else step)


_EVENTS: Final = {
    "gpu_faults": "GPU page faults",
    "cpu_faults": "CPU page faults",
    "migrations": "migrations",
    "allocations": "allocations of memory",
    "nvtx": "NVTX ranges",
    "kernels": "kernels",
}


def _of_each_kind(key: str, doc: str, unit: str) -> tuple[Key, ...]:
    """Declare an object with one entry for each kind of event."""
    return (
        Key(key, "object", "", doc),
        *(Key(f"{key}.{kind}", "text", unit, f"Of {name}.") for kind, name in _EVENTS.items()),
    )


_HEAD: Final = (
    Key("schema", "integer", "version", "Version of this contract."),
    Key("nsan_version", "text", "version", "The nsan that wrote the document."),
    Key("source", "text", "name", "File name of the capture, without its folder."),
    Key(
        "source_kind",
        "text",
        "label",
        "`nsys-sqlite`, `nsys-report`, `nsys-parquet`, `nsys-arrow`, `nvprof-sqlite`, "
        "`visual-profiler`, `nvprof-text` or `nsan-model` (modelled, not recorded).",
    ),
    Key("nsys_version", "text", "version", "The nsys that recorded.", null=True),
    Key("export_schema", "text", "version", "Schema of its export.", null=True),
    Key("driver_version", "text", "version", "NVIDIA driver of the recording machine.", null=True),
    Key("cuda_driver_version", "text", "version", "CUDA version of that driver.", null=True),
    Key("cpu", "text", "name", "CPU of the recording machine.", null=True),
    Key("session_start_utc_ns", "integer", "ns", "Start of the session, since 1970.", null=True),
    Key(
        "coherent_platform",
        "flag",
        "",
        "CPU and GPU share memory coherently (GH200, GB10, ...), so that much is not migrated.",
    ),
    *_of_each_kind("capture", "`recorded`, `not_recorded` or `unknown`.", "label"),
    *_of_each_kind(
        "switches", "The `nsys profile` switch that records it; empty: none would.", "option"
    ),
    *_of_each_kind("reasons", "Why `capture` gives this answer, in words.", "sentence"),
    Key("windows_ns", "list", "", "Windows of time that a filter kept.", null=True),
    Key("windows_ns[]", "list", "", "One window, `[start, end)`."),
    Key("windows_ns[][]", "integer", "ns", "Its start, then its end, from the session start."),
)

_MACHINE: Final = (
    Key("devices", "list", "", "GPUs as the processes number them."),
    Key("devices[]", "object", "", "One GPU."),
    Key("devices[].device_id", "integer", "id", "CUDA ordinal."),
    Key("devices[].pid", "integer", "id", "Process; null: any.", null=True),
    Key("devices[].gpu_id", "integer", "id", "The GPU in its machine.", null=True),
    Key("devices[].name", "text", "name", "Product name.", null=True),
    Key("devices[].chip", "text", "name", "Chip.", null=True),
    Key("devices[].total_memory_bytes", "integer", "byte", "GPU memory.", null=True),
    Key("devices[].memory_bytes_per_s", "integer", "byte/s", "Its bandwidth.", null=True),
    Key("devices[].n_sms", "integer", "SMs", "Streaming multiprocessors.", null=True),
    Key("devices[].compute_capability", "text", "version", "Compute capability.", null=True),
    Key("processes", "list", "", "Processes that have events."),
    Key("processes[]", "object", "", "One process."),
    Key("processes[].pid", "integer", "id", "Process."),
    Key("processes[].name", "text", "name", "Program, without its folder.", null=True),
    Key(
        "first_ns",
        "integer",
        "ns",
        "First start of an event: fault, migration, copy, memset, kernel, API call, NVTX range.",
        null=True,
    ),
    Key("last_ns", "integer", "ns", "Last end of one.", null=True),
    Key("duration_ns", "integer", "ns", "From the first start to the last end.", null=True),
)

_FAULTS: Final = (
    Key("gpu_faults", "object", "", "GPU page faults."),
    Key("gpu_faults.n_rows", "integer", "fault rows", "Rows: driver batches.", null=True),
    Key(
        "gpu_faults.n_page_faults",
        "integer",
        "faults",
        "Recorded counts added up; a count is of the batch's lowest page only.",
        null=True,
    ),
    Key("gpu_faults.n_addresses", "integer", "pages", "Distinct lowest pages.", null=True),
    Key("gpu_faults.n_va_blocks", "integer", "VA blocks", "Distinct VA blocks.", null=True),
    Key("gpu_faults.busy_ns", "integer", "ns", "At least one batch was in service.", null=True),
    Key("gpu_faults.by_access", "object", "", "By access of the lowest page.", null=True),
    Key("gpu_faults.by_access.<access>", "object", "", "`read`, `write`, `atomic`, ..."),
    Key("gpu_faults.by_access.<access>.n_rows", "integer", "fault rows", "Its rows."),
    Key("gpu_faults.by_access.<access>.n_page_faults", "integer", "faults", "As above.", null=True),
    Key("gpu_faults.groups", "list", "", "By access, GPU and process.", null=True),
    Key("gpu_faults.groups[]", "object", "", "One group that has rows."),
    Key("gpu_faults.groups[].access", "text", "label", "Access.", null=True),
    Key("gpu_faults.groups[].device_id", "integer", "id", "CUDA ordinal.", null=True),
    Key("gpu_faults.groups[].pid", "integer", "id", "Process.", null=True),
    Key("gpu_faults.groups[].n_rows", "integer", "fault rows", "Its rows."),
    Key("gpu_faults.groups[].n_page_faults", "integer", "faults", "As above.", null=True),
    Key(
        "gpu_faults.groups[].n_addresses",
        "integer",
        "pages",
        "Distinct in the group; these do not add up.",
        null=True,
    ),
    Key("gpu_faults.groups[].n_va_blocks", "integer", "VA blocks", "The same.", null=True),
    Key("cpu_faults", "object", "", "CPU page faults on managed memory."),
    Key("cpu_faults.n", "integer", "faults", "Rows: one is one fault.", null=True),
    Key("cpu_faults.n_addresses", "integer", "addresses", "Distinct addresses.", null=True),
    Key("cpu_faults.n_va_blocks", "integer", "VA blocks", "Distinct VA blocks.", null=True),
    Key("cpu_faults.groups", "list", "", "By process.", null=True),
    Key("cpu_faults.groups[]", "object", "", "One process that has rows."),
    Key("cpu_faults.groups[].pid", "integer", "id", "Process.", null=True),
    Key("cpu_faults.groups[].n_rows", "integer", "faults", "Its faults."),
    Key("cpu_faults.groups[].n_addresses", "integer", "addresses", "Distinct in it.", null=True),
    Key("cpu_faults.groups[].n_va_blocks", "integer", "VA blocks", "Distinct in it.", null=True),
)

_MIGRATIONS: Final = (
    Key("migrations", "object", "", "Managed memory moved between processors."),
    Key("migrations.n", "integer", "migrations", "Rows.", null=True),
    Key("migrations.bytes", "integer", "byte", "All bytes.", null=True),
    Key("migrations.htod_bytes", "integer", "byte", "Host to device.", null=True),
    Key("migrations.dtoh_bytes", "integer", "byte", "Device to host.", null=True),
    Key("migrations.dtod_bytes", "integer", "byte", "Device to device.", null=True),
    Key("migrations.by_cause", "object", "", "By cause.", null=True),
    Key(
        "migrations.by_cause.<cause>",
        "object",
        "",
        "`coherence` (page fault), `prefetch` (the driver's own), `user`, `eviction`, ...",
    ),
    Key("migrations.by_cause.<cause>.n", "integer", "migrations", "Its rows."),
    Key("migrations.by_cause.<cause>.bytes", "integer", "byte", "Its bytes.", null=True),
    Key("migrations.busy_ns", "integer", "ns", "At least one was in flight.", null=True),
    Key("migrations.min_va", "text", "byte address", "Lowest first byte moved.", null=True),
    Key("migrations.max_va", "text", "byte address", "Highest first byte moved.", null=True),
    Key("migrations.groups", "list", "", "By direction, cause, GPU and process.", null=True),
    Key("migrations.groups[]", "object", "", "One group that has rows."),
    Key("migrations.groups[].direction", "text", "label", "`htod`, `dtoh`, `dtod`.", null=True),
    Key("migrations.groups[].cause", "text", "label", "Cause.", null=True),
    Key("migrations.groups[].device_id", "integer", "id", "CUDA ordinal.", null=True),
    Key("migrations.groups[].pid", "integer", "id", "Process.", null=True),
    Key("migrations.groups[].n", "integer", "migrations", "Its rows."),
    Key("migrations.groups[].bytes", "integer", "byte", "Its bytes.", null=True),
    Key("migrations.groups[].min_bytes", "integer", "byte", "Smallest migration.", null=True),
    Key("migrations.groups[].max_bytes", "integer", "byte", "Largest migration.", null=True),
    Key("migrations.groups[].min_va", "text", "byte address", "Lowest first byte.", null=True),
    Key("migrations.groups[].max_va", "text", "byte address", "Highest first byte.", null=True),
    Key("migrations.groups[].busy_ns", "integer", "ns", "One was in flight.", null=True),
    Key(
        "migrations.groups[].bytes_per_s",
        "number",
        "byte/s",
        "Bytes over busy time: how fast copies ran while they ran.",
        null=True,
    ),
)

_FIGURES_WITH_KIND: Final = {
    "gpu_faults": "Rows and counts of GPU page faults.",
    "cpu_faults": "Rows of CPU page faults.",
    "migrations": "Rows and bytes of migrations.",
    "busy_ns": "Wherever it stands.",
    "bytes_per_s": "Wherever it stands.",
    "n_addresses": "Wherever it stands.",
    "n_va_blocks": "Wherever it stands.",
    "duration_ns": "Of the capture.",
}

_REST: Final = (
    Key("kernels", "object", "", "Kernels."),
    Key("kernels.n", "integer", "kernels", "Rows that are one kernel.", null=True),
    Key(
        "kernels.n_graph_launches",
        "integer",
        "launches",
        "Rows that are a whole CUDA graph.",
        null=True,
    ),
    Key("kernels.busy_ns", "integer", "ns", "At least one of both ran.", null=True),
    Key(
        "driver_events",
        "object",
        "",
        "Measures of the driver against ping-pong; null for nsys, which has no table for them.",
        null=True,
    ),
    Key(
        "driver_events.<event>",
        "integer",
        "events",
        "`thrashing` detected, an access throttled (`throttling`), memory mapped from afar "
        "(`remote_map`).",
    ),
    Key("managed", "object", "", "Managed memory."),
    Key("managed.n_allocations", "integer", "allocations", "Managed allocations.", null=True),
    Key("managed.bytes", "integer", "byte", "Their size.", null=True),
    Key("managed.n_calls", "integer", "calls", "Calls of cudaMallocManaged.", null=True),
    Key("health", "list", "", "Whether the capture can be trusted, worst first."),
    Key("health[]", "object", "", "One check."),
    Key("health[].id", "text", "name", "Stays the same from version to version."),
    Key("health[].status", "text", "label", "`fail`, `warn`, `unknown` or `ok`."),
    Key("health[].text", "text", "sentence", "The finding."),
    Key("kinds", "object", "", "What kind of number a figure is."),
    *(
        Key(f"kinds.{name}", "text", "label", f"`recorded` or `derived`. {doc}")
        for name, doc in _FIGURES_WITH_KIND.items()
    ),
)

SUMMARY_KEYS: Final = (*_HEAD, *_MACHINE, *_FAULTS, *_MIGRATIONS, *_REST)
"""Keys of :func:`nsan.summary` and of `nsan summary --json`, in the order of the document."""

RECORDING_KEYS: Final = (
    Key("recording", "object", "", "How the program was recorded."),
    Key("recording.report", "text", "name", "The nsys report."),
    Key("recording.facts", "text", "name", "The file beside it that holds this object."),
    Key("recording.seconds_alone", "number", "s", "The program without nsys.", null=True),
    Key("recording.seconds_nsys", "number", "s", "nsys as a whole."),
    Key("recording.status_alone", "integer", "status", "Its exit status alone.", null=True),
    Key("recording.status_recorded", "integer", "status", "Its exit status under nsys."),
    Key("recording.options", "list", "", "Options of `nsys profile`."),
    Key("recording.options[]", "text", "option", "One of them."),
    Key("recording.nsys_version", "text", "version", "The nsys that recorded."),
    Key("recording.driver_version", "text", "version", "NVIDIA kernel module.", null=True),
    Key(
        "recording.uvm_parameters",
        "object",
        "",
        "Parameters of the nvidia_uvm module; empty where it is not loaded.",
    ),
    Key("recording.uvm_parameters.<parameter>", "text", "as the driver has it", "Its value."),
)
"""What `nsan record --json` adds to the summary."""

ANALYSIS_KEYS: Final = (
    Key("schema", "integer", "version", "Version of this contract."),
    Key("source", "text", "name", "As in the summary."),
    Key("source_kind", "text", "label", "As in the summary; `torch-snapshot` of a snapshot."),
    Key("snapshot", "text", "name", "The snapshot (of a trace joined with one).", null=True),
    *_of_each_kind("capture", "As in the summary (of a trace).", "label"),
    Key("windows_ns", "list", "", "As in the summary (not of a snapshot alone).", null=True),
    Key("windows_ns[]", "list", "", "One window, `[start, end)`."),
    Key("windows_ns[][]", "integer", "ns", "Its start, then its end."),
    Key("analysis", "text", "name", "Which analysis."),
    Key("question", "text", "sentence", "What it answers."),
    Key("row", "text", "phrase", "What one row is."),
    Key("options", "object", "", "Its options with their values."),
    Key("options.<option>", "any", "of the option", "A value.", null=True),
    Key("columns", "list", "", "Its columns, in order."),
    Key("columns[]", "object", "", "One column."),
    Key("columns[].name", "text", "name", "Name."),
    Key("columns[].unit", "text", "unit", "What one step of a number means."),
    Key("columns[].kind", "text", "label", "`recorded`, `derived`, `reconstructed`, `modelled`."),
    Key("columns[].doc", "text", "sentence", "What the value says."),
    Key("rows", "list", "", "Every row, whatever `--rows` says."),
    Key("rows[]", "object", "", "One row."),
    Key(
        "rows[].<column>",
        "any",
        "of the column",
        "A value; an address is hexadecimal text.",
        null=True,
    ),
)
"""Keys of an analysis as JSON: of `nsan analyse --json`, and of every `--by`."""
