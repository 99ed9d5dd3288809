"""`nsys export --ts-shift` and `--ts-normalize` move every time; nsan counts from the session start.

Measured with nsys 2023.4.4: EXPORT_CONFIG_TIME_SHIFT holds exactly what was added, by either switch.
"""

from __future__ import annotations

import exports as x
import pytest

import nsan


def _export(shift):
    export = x.Export()
    export.add(x.KERNEL, x.kernel(100 + shift, 400 + shift))
    export.add(x.MEMCPY, x.migration(120 + shift, 150 + shift, 4096))
    export.add(x.GPU_FAULTS, x.gpu_fault(110 + shift, 160 + shift))
    export.add(x.NVTX, x.nvtx(90 + shift, None, "open"))
    export.add(x.MEMORY, x.memory_event(50 + shift, x.VA, 4096))
    facts = {"EXPORT_SCHEMA_VERSION": "3.7.2", "EXPORT_PARAM_LAZY": "true"}
    facts["EXPORT_CONFIG_TIME_SHIFT"] = str(shift)
    rows = [{"name": name, "value": value} for name, value in facts.items()]
    return export.add("META_DATA_EXPORT", *rows)


@pytest.mark.parametrize("shift", [1_795_963_810_303_808_441, 1_000_000_000, -7])
def test_shifted_times_come_back_to_the_session_start(tmp_path, shift):
    trace = nsan.open_trace(_export(shift).write(tmp_path / "shifted.sqlite"))
    assert trace.kernels.select("start_ns", "end_ns").collect().rows() == [(100, 400)]
    assert trace.migrations.select("start_ns", "end_ns").collect().rows() == [(120, 150)]
    assert trace.gpu_faults.select("start_ns", "end_ns").collect().rows() == [(110, 160)]
    assert trace.nvtx_ranges.select("start_ns", "end_ns", "closed").collect().rows() == [
        (90, 400, False)
    ]
    assert trace.allocations.select("alloc_ns").collect().rows() == [(50,)]


def test_a_shift_that_is_no_number_is_no_shift(tmp_path):
    export = _export(0)
    export.rows["META_DATA_EXPORT"][-1]["value"] = "soon"
    trace = nsan.open_trace(export.write(tmp_path / "odd.sqlite"))
    assert trace.kernels.select("start_ns").collect().item() == 100
