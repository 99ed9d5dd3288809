from __future__ import annotations

import exports as x
import pytest


def gpu(number, ordinal, name, **more):
    return {
        "id": number,
        "cuDevice": ordinal,
        "name": name,
        "chipName": "GA100",
        "totalMemory": 80 << 30,
        "memoryBandwidth": 2_000_000_000_000,
        "smCount": 108,
        "computeMajor": 8,
        "computeMinor": 0,
        **more,
    }


def mapping(gpu_id, cuda_id, pid):
    return {"gpuId": gpu_id, "cudaId": cuda_id, "pid": pid}


def names(trace):
    return dict(trace.devices.select("device_id", "name").collect().rows())


def test_a_gpu_is_named_by_its_cuda_ordinal_and_not_by_its_row(trace_of):
    rows = [gpu(number, 3 - number, f"NVIDIA {number}") for number in range(4)]
    got = trace_of(x.Export().add(x.GPU, *rows).add(x.KERNEL, x.kernel(0, 1, device=0)))
    assert names(got) == {0: "NVIDIA 3", 1: "NVIDIA 2", 2: "NVIDIA 1", 3: "NVIDIA 0"}


def test_properties_of_a_gpu_are_kept(trace_of):
    got = trace_of(x.Export().add(x.GPU, gpu(0, 0, "NVIDIA A100"))).devices.collect()
    assert got.drop("pid", "gpu_id").row(0) == (
        0,
        "NVIDIA A100",
        "GA100",
        80 << 30,
        2_000_000_000_000,
        108,
        "8.0",
    )


def test_a_map_per_process_wins_over_the_ordinal(trace_of):
    got = trace_of(
        x.Export("2025.5.1")
        .add(x.GPU, gpu(0, 0, "NVIDIA zero"), gpu(1, 1, "NVIDIA one"))
        .add(x.CUDA_DEVICE, mapping(0, 0, 1), mapping(1, 0, 2))
        .add(x.KERNEL, x.kernel(0, 1, pid=1), x.kernel(0, 1, pid=2))
    ).devices.collect()
    rows = got.select("device_id", "pid", "gpu_id", "name").filter(got["pid"].is_not_null()).rows()
    assert rows == [(0, 1, 0, "NVIDIA zero"), (0, 2, 1, "NVIDIA one")]


def test_without_a_gpu_table_a_gpu_is_its_number(trace_of):
    got = trace_of(x.Export().add(x.KERNEL, x.kernel(0, 1, device=2), x.kernel(2, 3, device=0)))
    assert names(got) == {0: None, 2: None}


def test_a_gpu_that_the_table_does_not_describe_is_its_number(trace_of):
    got = trace_of(
        x.Export().add(x.GPU, gpu(0, 0, "NVIDIA A100")).add(x.KERNEL, x.kernel(0, 1, device=5))
    )
    assert names(got) == {0: "NVIDIA A100", 5: None}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_adapter_of_another_maker_is_not_gpu_zero(trace_of, place):
    adapters = ["Intel(R) UHD Graphics 770", "Microsoft Basic Render Driver"]
    adapters.insert(place, "NVIDIA GeForce RTX 4060")
    rows = [gpu(number, 0, name) for number, name in enumerate(adapters)]
    got = trace_of(x.Export().add(x.GPU, *rows).add(x.KERNEL, x.kernel(0, 1)))
    assert names(got) == {0: "NVIDIA GeForce RTX 4060"}


def test_an_absent_gpu_is_answered_with_those_present(trace_of):
    from nsan.errors import UnknownFilterValueError

    got = trace_of(x.Export().add(x.GPU, gpu(0, 1, "NVIDIA A"), gpu(1, 0, "NVIDIA B")))
    with pytest.raises(UnknownFilterValueError, match=r"no GPU 2\. It has: 0, 1"):
        got.filter(device=2)


def two_ranks(gpu_of_second, **more):
    """Process 1 calls GPU 0 its device 0, and process 2 calls ``gpu_of_second`` its device 0."""
    return (
        x.Export("2025.5.1", **more)
        .add(x.GPU, gpu(0, 0, "NVIDIA A100"), gpu(1, 1, "NVIDIA A100"))
        .add(x.CUDA_DEVICE, mapping(0, 0, 1), mapping(gpu_of_second, 0, 2))
    )


@pytest.mark.parametrize(("second", "busy_ns"), [(1, 200), (0, 150)])
def test_busy_time_is_a_union_per_physical_gpu_added_up(summary_of, second, busy_ns):
    got = summary_of(
        two_ranks(second)
        .add(x.KERNEL, x.kernel(0, 100, pid=1), x.kernel(50, 150, pid=2))
        .add(x.MEMCPY, x.migration(0, 100, 4096, pid=1), x.migration(50, 150, 4096, pid=2))
        .add(x.GPU_FAULTS, x.gpu_fault(0, 100, pid=1), x.gpu_fault(50, 150, pid=2))
    )
    assert got["kernels"]["busy_ns"] == busy_ns
    assert got["migrations"]["busy_ns"] == busy_ns
    assert got["gpu_faults"]["busy_ns"] == busy_ns


def test_one_gpu_under_two_ordinals_is_one_gpu(summary_of):
    got = summary_of(
        x.Export("2025.5.1")
        .add(x.GPU, gpu(0, 0, "NVIDIA A100"), gpu(1, 1, "NVIDIA A100"))
        .add(x.CUDA_DEVICE, mapping(1, 0, 1), mapping(0, 0, 2), mapping(1, 1, 2))
        .add(x.KERNEL, x.kernel(0, 100, pid=1, device=0), x.kernel(50, 150, pid=2, device=1))
    )
    assert got["kernels"]["busy_ns"] == 150


def test_without_a_map_one_ordinal_is_one_gpu(summary_of):
    got = summary_of(
        x.Export().add(
            x.KERNEL,
            x.kernel(0, 100, pid=1),
            x.kernel(50, 150, pid=2),
            x.kernel(50, 150, pid=2, device=1),
        )
    )
    assert got["kernels"]["busy_ns"] == 250


def test_the_share_of_busy_time_counts_physical_gpus():
    from nsan.reading import reading

    document = {
        "migrations": {
            "n": 2,
            "busy_ns": 200,
            "groups": [{"direction": "dtod", "cause": "user", "bytes": 4096}],
        },
        "duration_ns": 100,
        "windows_ns": None,
        "devices": [
            {"device_id": 0, "pid": 1, "gpu_id": 0},
            {"device_id": 0, "pid": 2, "gpu_id": 1},
        ],
    }
    assert "100.0%" in reading(document)[-1]


def test_a_process_that_the_map_leaves_out_still_has_its_gpu(trace_of):
    got = trace_of(
        x.Export("2025.5.1")
        .add(x.GPU, gpu(0, 0, "NVIDIA A100"))
        .add(x.CUDA_DEVICE, mapping(0, 0, 1))
        .add(x.KERNEL, x.kernel(0, 1, pid=1), x.kernel(2, 3, pid=2))
    )
    assert got.filter(pid=2, device=0).kernels.collect()["start_ns"].to_list() == [2]
