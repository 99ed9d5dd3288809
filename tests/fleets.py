"""Folders of many small exports whose truth is known, for tests of fleets."""

from __future__ import annotations

import exports as x


def report(seed, *, n=3, gpu_faults=True, variables=()):
    """Make an export whose rows follow from a number."""
    export = x.Export()
    for i in range(n):
        start = 1_000 * i + 10 * seed
        export.add(
            x.MEMCPY, x.migration(start, start + 100 + seed, 4096 * (seed + 1), x.VA + 4096 * i)
        )
        export.add(x.RUNTIME, x.api_call(start, start + 5))
        if gpu_faults:
            export.add(x.GPU_FAULTS, x.gpu_fault(start, start + 50, x.VA + 4096 * i, n=seed + 1))
    export.add(x.KERNEL, x.kernel(0, 5_000 + seed))
    if variables:
        options = [{"name": "PROCESS_0:ENVIRONMENT_VARIABLE", "value": v} for v in variables]
        export.add("META_DATA_CAPTURE", *options)
    return export


def write(folder, names, **more):
    """Write reports of these names, the first of seed 0; return their paths."""
    paths = []
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        paths.append(report(seed, **more).write(path))
    return paths


def poison(path):
    """Cut an export short, so that it cannot be read."""
    path.write_bytes(path.read_bytes()[:5_000])


def contents(folder):
    """Return all files below a folder with their bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
