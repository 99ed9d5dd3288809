"""Whole exports to damage: small, of many versions, with every kind of event."""

from __future__ import annotations

import gzip

import exports as x

_REAL = (
    "um_easycuda_rtx4060l_2023.4.4_lazy",
    "um_easycuda_rtx4060l_2023.4.4_nonlazy",
    "reduced_6tables_2026.1.1",
)
_VERSIONS = ("2022.1", "2022.4", "2023.4.4", "2024", "2025", "2026")


def write(random, path):
    """Write an export; return its path."""
    if random.random() < 0.03:
        packed = x.TRACES / f"{random.choice(_REAL)}.sqlite.gz"
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        return path
    return made(random).write(path)


def made(random):
    """Put an export together, of one or two processes on one or two GPUs."""
    known = [v for v in x.versions() if v.startswith(_VERSIONS)]
    export = x.Export(random.choice(known), lazy=random.random() < 0.8)
    pids = [x.PID] if random.random() < 0.7 else [x.PID, 77]
    devices = [0] if random.random() < 0.7 else [0, 1]
    size = random.choice((3, 8, 20, 60))
    _memory(random, export, size, pids, devices)
    _work(random, export, size, pids, devices)
    _nvtx(random, export, size, pids)
    _machine(random, export, pids, devices)
    return export


def _somewhere(random):
    return x.VA + random.randrange(16) * x.MIB + random.randrange(256) * 4096


def _memory(random, export, size, pids, devices):
    at = 1000
    for _ in range(size):
        pid, device = random.choice(pids), random.choice(devices)
        va = _somewhere(random)
        export.add(
            x.GPU_FAULTS,
            x.gpu_fault(
                at,
                at + 9000,
                va,
                n=random.randrange(1, 257),
                access=random.randrange(5),
                device=device,
                pid=pid,
            ),
        )
        for _ in range(random.randrange(3)):
            cause = random.choice((x.COHERENCE, x.PREFETCH))
            export.add(
                x.MEMCPY,
                x.migration(at + 3000, at + 4000, 4096, va, cause=cause, device=device, pid=pid),
            )
            va += 4096
        if random.random() < 0.3:
            export.add(
                x.MEMCPY,
                x.migration(
                    at + 20,
                    at + 800,
                    65536,
                    _somewhere(random),
                    kind=x.DTOH,
                    cause=random.choice((1, 2, 4)),
                    device=device,
                    pid=pid,
                ),
            )
        if random.random() < 0.3:
            export.add(
                x.CPU_FAULTS,
                x.cpu_fault(at + 50, _somewhere(random), pid=pid, function=3, module=4),
            )
        at += random.randrange(1, 20_000)
    for i in range(4):
        va = x.VA + 4 * i * x.MIB
        export.add(
            x.MEMORY,
            x.memory_event(
                10 + i, va, 4 * x.MIB, kind=random.choice((2, 4, 4, 6)), pid=random.choice(pids)
            ),
        )
        if random.random() < 0.4:
            export.add(x.MEMORY, x.memory_event(at, va, 4 * x.MIB, free=True, pid=pids[0]))


def _work(random, export, size, pids, devices):
    at = 500
    for i in range(max(2, size // 4)):
        pid, device = random.choice(pids), random.choice(devices)
        export.add(
            x.RUNTIME,
            x.api_call(
                at - 90, at - 10, name=random.choice((1, 2)), pid=pid, tid=pid, correlation=i
            ),
        )
        export.add(x.KERNEL, x.kernel(at, at + 7000, device=device, pid=pid, correlation=i))
        if random.random() < 0.4:
            export.add(
                x.MEMCPY,
                x.copy(
                    at,
                    at + 100,
                    1000,
                    kind=random.choice((1, 2, 8, 10)),
                    device=device,
                    pid=pid,
                    correlation=i,
                ),
            )
        at += random.randrange(1, 30_000)
    if random.random() < 0.3:
        export.add(x.MEMSET, {**x.kernel(at, at + 10), "bytes": 4096, "memKind": 4})
    if random.random() < 0.2 and x.GRAPH in export.tables:
        export.add(x.GRAPH, {**x.kernel(at, at + 500), "graphId": 3})


def _nvtx(random, export, size, pids):
    for i in range(size // 3):
        start = 100 + i * 5000
        export.add(
            x.NVTX,
            x.nvtx(
                start,
                start + random.choice((100, 4000, 20_000)),
                f"step {i % 3}",
                pid=random.choice(pids),
            ),
        )
    export.add(
        x.NVTX, x.nvtx(50, 90_000, None, text_id=3, kind=60), x.nvtx(70, None, "mark", kind=34)
    )


def _machine(random, export, pids, devices):
    gpu = {
        "totalMemory": 8 << 30,
        "memoryBandwidth": 10**11,
        "smCount": 30,
        "computeMajor": 8,
        "computeMinor": 9,
    }
    for device in devices:
        if random.random() < 0.8:
            export.add(
                x.GPU,
                {
                    **gpu,
                    "id": device,
                    "name": "NVIDIA GeForce",
                    "chipName": "AD107",
                    "cuDevice": device,
                },
            )
    if random.random() < 0.3:
        for pid in pids:
            export.add(x.CUDA_DEVICE, *({"gpuId": d, "cudaId": d, "pid": pid} for d in devices))
    if random.random() < 0.5:
        export.add(
            "PROCESSES",
            *(
                {"globalPid": x.global_pid(pid), "pid": pid, "name": "/home/alice/bin/app"}
                for pid in pids
            ),
        )
    if random.random() < 0.3:
        export.add(
            "DIAGNOSTIC_EVENT",
            {
                "timestamp": 5,
                "timestampType": 1,
                "severity": 2,
                "text": "CUPTI lost events",
                "globalPid": x.global_pid(pids[0]),
            },
        )
    if random.random() < 0.3:
        export.add("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": 1_700_000_000_000_000_000})
