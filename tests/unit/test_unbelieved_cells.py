"""Cells that hold a whole number and none that can be: they are counted as lost, and no total leaves them out."""

from __future__ import annotations

import exports as x

import nsan


def allocated(*operations):
    export = x.Export()
    for at, operation in enumerate(operations):
        row = x.memory_event(at, x.VA + at * x.MIB, 4096)
        export.add(x.MEMORY, row | {"memoryOperationType": operation})
    return export


def test_an_operation_that_is_neither_an_allocation_nor_a_release_makes_their_number_unknown(
    trace_of,
):
    """The third is of a kind that nobody knows yet: paired as a release, it would be one of an allocation before the capture."""
    trace = trace_of(allocated(0, 0, 2))
    assert trace.info.losses == {x.MEMORY: {"memoryOperationType": 1}}
    summary = nsan.summary(trace)
    assert summary["capture"]["allocations"] == "unknown"
    assert summary["managed"]["n_allocations"] is None
    assert summary["managed"]["bytes"] is None
    assert trace.allocations.collect()["alloc_ns"].to_list() == [0, 1]


def test_allocations_of_known_operations_are_counted(summary_of):
    assert summary_of(allocated(0, 0, 0))["managed"]["n_allocations"] == 3


def ranges(end):
    """A range that ends at 50, and another that ends somewhere, beside a migration until 100."""
    export = x.Export().add(x.MEMCPY, x.migration(0, 100, 4096))
    return export.add(x.NVTX, x.nvtx(10, 50, "a"), x.nvtx(20, end, "b"))


def test_an_end_of_a_range_that_cannot_be_is_no_open_end(trace_of):
    trace = trace_of(ranges((1 << 61) + 1))
    assert trace.info.losses == {x.NVTX: {"end": 1}}
    assert nsan.summary(trace)["duration_ns"] is None


def test_a_range_that_was_never_closed_is_no_loss(trace_of):
    trace = trace_of(ranges(None))
    assert trace.info.losses == {}
    assert nsan.summary(trace)["duration_ns"] == 100
    assert trace.nvtx_ranges.collect()["end_ns"].to_list() == [50, 100]


def test_a_process_number_that_no_process_has_is_lost_and_the_rest_is_read(trace_of):
    export = x.Export().add(x.MEMCPY, x.migration(0, 100, 4096))
    export.add(
        x.CUDA_DEVICE, *({"gpuId": 3, "cudaId": 0, "pid": pid} for pid in (x.PID, -1, 1 << 32))
    )
    trace = trace_of(export)
    assert trace.info.losses == {"TARGET_INFO_CUDA_DEVICE": {"pid": 2}}
    assert nsan.summary(trace)["migrations"]["bytes"] == 4096
    found = trace.devices.collect().select("pid", "gpu_id").rows()
    assert (x.PID, 3) in found
