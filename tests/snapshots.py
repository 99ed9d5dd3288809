"""Build memory snapshots of PyTorch by hand, in the format of every version, and hostile pickles.

One small allocator, whose truth is known, is written with the keys of any version
(``allocator.md`` 7): two segments, six blocks, a whole history.
"""

from __future__ import annotations

import copy
import gzip
import pickle
import struct
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "sample_data" / "snapshots"
REAL = {
    "decomfl": "decomfl_opt125m_full_history",
    "verl": "verl_vllm_two_mempools",
    "kivi": "kivi_llama_state_only",
    "flexgen_opt1.3b": "flexgen_opt1.3b_old_format",
    "flexgen_oom": "flexgen_oom_old_format",
}
VERSIONS = tuple((2, minor) for minor in range(15))
MIB = 1 << 20
VA = 0x7F00_0000_0000
SMALL, LARGE = VA, VA + 2 * MIB
"""Addresses of the two segments: of the small pool, and of a MemPool on another stream."""

START_US = 1_700_000_000_000_000

MODULE = {"name": "forward", "filename": "/home/someone/net.py", "line": 12}
MAIN = {"name": "<module>", "filename": "/home/someone/train.py", "line": 3}
STACK = [MODULE, MAIN]

# name, address, size, requested, state
BLOCKS = {
    SMALL: (
        (SMALL, 512, 100, "active_allocated"),
        (SMALL + 512, 1024, 1000, "inactive"),
        (SMALL + 1536, 512, 512, "active_pending_free"),
        (SMALL + 2048, 2 * MIB - 2048, 0, "inactive"),
    ),
    LARGE: (
        (LARGE, 2 * MIB, 2_000_000, "active_allocated"),
        (LARGE + 2 * MIB, 18 * MIB, 0, "inactive"),
    ),
}
# action, address, size, stream, pool
HISTORY = (
    ("segment_alloc", SMALL, 2 * MIB, 0, (0, 0)),
    ("alloc", SMALL, 100, 0, (0, 0)),
    ("alloc", SMALL + 512, 1000, 0, (0, 0)),
    ("alloc", SMALL + 1536, 512, 0, (0, 0)),
    ("segment_alloc", LARGE, 20 * MIB, 7, (0, 1)),
    ("alloc", LARGE, 2_000_000, 7, (0, 1)),
    ("free_requested", SMALL + 512, 1000, 0, (0, 0)),
    ("free_completed", SMALL + 512, 1000, 0, (0, 0)),
    ("free_requested", SMALL + 1536, 512, 0, (0, 0)),
    ("oom", 3 * MIB, 64 * MIB, 0, (0, 0)),
    ("snapshot", 0, 2 * MIB + 1024, 0, (0, 0)),
)
"""For an oom the second is the free memory of the GPU."""


def real_bytes(name):
    """Give the pickle of a real snapshot."""
    return gzip.decompress((FOLDER / f"{REAL[name]}.pickle.gz").read_bytes())


def block(va, n_bytes, requested, state, *, version=(2, 9), frames=STACK):
    found = {"size": n_bytes, "requested_size": requested, "state": state}
    if version >= (2, 1):
        return {"address": va, **found, "frames": frames}
    return {**found, "history": [{"addr": va, "real_size": requested, "frames": frames}]}


def segment(va=SMALL, blocks=None, *, version=(2, 9), stream=0, pool=(0, 0), device=0):
    if blocks is None:
        blocks = [block(*each, version=version) for each in BLOCKS[va]]
    of = {
        state: [b for b in blocks if b["state"] == state]
        for state in ("active_allocated", "active_pending_free")
    }
    allocated = sum(b["size"] for b in of["active_allocated"])
    total = sum(b["size"] for b in blocks)
    found = {
        "device": device,
        "address": va,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated + sum(b["size"] for b in of["active_pending_free"]),
        "requested_size": sum(b["requested_size"] for state in of.values() for b in state),
        "stream": stream,
        "segment_type": "small" if total == 2 * MIB else "large",
    }
    if version >= (2, 1):
        found |= {"segment_pool_id": pool, "is_expandable": False, "frames": STACK}
    return found | {"blocks": blocks}


def entry(action, va, size, stream=0, pool=(0, 0), *, version=(2, 9), time_us=START_US):
    where = "device_free" if action == "oom" else "addr"
    found = {"action": action, where: va, "size": size, "stream": stream}
    if version >= (2, 2):
        found["time_us"] = time_us
    if version >= (2, 8):
        found["compile_context"] = "N/A"
    if version >= (2, 10):
        found["user_metadata"] = ""
    if version >= (2, 12):
        found["pool_id"] = pool
    return found | {"frames": STACK}


def settings(version=(2, 9)):
    found = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
    }
    if version >= (2, 9):
        found["graph_capture_record_stream_reuse"] = False
    if version >= (2, 13):
        found |= {"max_round_threshold": 0, "max_cached_size": 0}
    return found


def segments(version=(2, 9)):
    return [
        segment(SMALL, version=version),
        segment(LARGE, version=version, stream=7, pool=(0, 1)),
    ]


def snapshot(version=(2, 9)):
    """Write the small allocator with the keys of one version, in containers that the caller may change."""
    found = {
        "segments": segments(version),
        "device_traces": [
            [
                entry(*each, version=version, time_us=START_US + 10 * i)
                for i, each in enumerate(HISTORY)
            ],
            [],
        ],
    }
    if version >= (2, 3):
        found["allocator_settings"] = settings(version)
    if version >= (2, 5):
        found["external_annotations"] = [
            {"name": "step", "stage": stage, "device": 0, "time_us": START_US + at}
            for stage, at in (("START", 5), ("END", 105))
        ]
    if version >= (2, 14):
        found |= {"host_segments": [{"address": 1}, {"address": 2}], "host_traces": [[{}, {}, {}]]}
    return copy.deepcopy(found)


def opened_here(content, *, protocol=4):
    """Open plain containers without a file and a process: what the child would answer, as frames."""
    from nsan.io.torch_snapshot import child, frames, reader

    answer = b"".join(child.read(pickle.dumps(content, protocol=protocol)))
    return frames.snapshot_of(reader.RawSnapshot(answer), Path("s.pickle"))


def write(path, content, *, protocol=4, packed=False):
    """Write plain containers as a pickle."""
    data = pickle.dumps(content, protocol=protocol)
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


class Opcodes:
    """A pickle put together by hand, opcode by opcode."""

    def __init__(self, protocol=4):
        self.data = bytearray(b"\x80" + bytes([protocol]))

    def add(self, *parts):
        for part in parts:
            self.data += part
        return self

    def text(self, text):
        data = text.encode()
        return self.add(b"X", struct.pack("<I", len(data)), data)

    def number(self, value):
        n = value.bit_length() // 8 + 1
        return self.add(b"\x8a", bytes([n]), value.to_bytes(n, "little", signed=True))

    def write(self, path):
        path.write_bytes(bytes(self.data) + b".")
        return path
