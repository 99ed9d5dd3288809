"""The machine under torch_uvm: what stands against a run, and the CUDA runtime that PyTorch has loaded.

Standard library only, Python 3.9 or newer: it travels beside ``torch_uvm.py``. Sizes are in byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DONE, FAILED, USAGE, NO_DRIVER, SKIPPED, REFUSED, INTERRUPTED = 0, 1, 2, 5, 6, 7, 130
STATUSES = {
    DONE: "ok",
    FAILED: "failed",
    USAGE: "usage",
    NO_DRIVER: "no_driver",
    SKIPPED: "skipped",
    REFUSED: "refused",
    INTERRUPTED: "interrupted",
}
"""Exit statuses, and their names in run.json (``cuda/nsan/errors.hpp``)."""

MIB = 1 << 20
GRANULE = 2 * MIB
LEAST_AVAILABLE = 8 * GRANULE
ADVICES = {"read-mostly": 1, "preferred-cpu": 3, "accessed-by": 5}
SINCE = {"raw": (2, 0), "caching": (2, 8)}
TRAPS = ("expandable_segments:true", "backend:cudamallocasync")
CUDA_ENDS = {
    35: (NO_DRIVER, ": install an NVIDIA driver, or run on a machine with a GPU"),
    100: (NO_DRIVER, ": run on a machine with a GPU, or let this one be seen"),
    101: (USAGE, ": choose another --device"),
}
"""What some values of cudaError mean for a run: too old or no driver, no device, no such device."""

_PROFILERS = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")


class EndedError(Exception):
    """An end that the program foresees: exit status, and one line with the way out."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(reason)


def check_version(text: str, allocator: str) -> list[str]:
    """Refuse a version of PyTorch that cannot do it; give notes on one that does it in its own way."""
    found = re.match(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    least = SINCE[allocator]
    if version < least:
        why = "frees segments of a pool by the wrong function, and not every thread gets managed memory"
        raise EndedError(
            SKIPPED,
            f"--allocator {allocator} needs PyTorch {least[0]}.{least[1]} or newer, and this is {text}: an older one "
            f"{why if allocator == 'caching' else 'has no pluggable allocator'}; install a newer one",
        )
    if allocator == "caching" and version < (2, 13):
        return [
            f"PyTorch {text} does not look for ended streams inside a pool: memory that several streams used waits"
        ]
    return []


def check_environment(environment: Mapping[str, str], allocator: str) -> None:
    """Refuse settings of PyTorch under which nothing is cached, or the memory is not managed."""
    if allocator == "caching" and "PYTORCH_NO_CUDA_MEMORY_CACHING" in environment:
        raise EndedError(
            USAGE,
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set, and some versions switch the cache off whatever its value: "
            "unset it, or use --allocator raw",
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        setting = re.sub(r"\s", "", environment.get(name, "")).lower()
        for trap in TRAPS:
            if trap in setting:
                raise EndedError(
                    USAGE, f"{name} has {trap}, whose memory is never managed: unset it"
                )


def check_footprint(managed: int, available: int, host: int, *, is_allowed: bool) -> None:
    """Refuse a footprint that could leave the GPU or the host without memory."""
    reserve = max(512 * MIB, host // 8)
    smaller = "choose a smaller --batch, --width or --depth"
    if managed + reserve > host:
        raise EndedError(
            REFUSED,
            f"the host has {host // MIB} MiB available for about {managed // MIB} MiB of managed memory, of which "
            f"{reserve // MIB} MiB must stay free: {smaller}",
        )
    if managed > available and not is_allowed:
        raise EndedError(
            REFUSED,
            f"about {managed // MIB} MiB of managed memory is more than the {available // MIB} MiB available on the GPU: "
            f"{smaller}; some drivers can hang the whole machine when they evict, and "
            "--allow-oversubscription does it all the same",
        )


def ballast_of(managed: int, free: int, factor: float | None) -> int:
    """Give what to take from the GPU so that ``managed / factor`` remains, in whole 2 MiB."""
    if factor is None:
        return 0
    wanted = int(managed / factor)
    if not LEAST_AVAILABLE <= wanted <= free:
        raise EndedError(
            REFUSED,
            f"--oversubscription-factor {factor:g} needs {wanted // MIB} MiB available on the GPU for about "
            f"{managed // MIB} MiB of managed memory, and from {LEAST_AVAILABLE // MIB} to {free // MIB} MiB can be had: "
            "choose another factor, --batch, --width or --depth",
        )
    return (free - wanted) // (2 * MIB) * (2 * MIB)


def host_available(root: str = "/") -> int:
    """Read what the host has left, within the limit of a container."""
    text = Path(root, "proc/meminfo").read_text(encoding="utf-8")
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    available = int(found[1]) * 1024 if found else 0
    group = Path(root, "sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit is no file, or "max"
        limit, used = (int((group / f"memory.{w}").read_text()) for w in ("max", "current"))
        available = min(available, max(limit - used, 0))
    return available


class Location(ctypes.Structure):
    """cudaMemLocation: a GPU by its ordinal (type 1), or the host (type 2)."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Runtime:
    """The CUDA runtime that PyTorch has loaded: what PyTorch has no call for."""

    def __init__(self, device: int) -> None:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        found = re.search(r"(/.*/libcudart[-\w]*\.so[.\d]*)$", maps, re.MULTILINE)
        if found is None:
            raise EndedError(SKIPPED, "this PyTorch is built without CUDA: install one that has it")
        self._library, self.device = ctypes.CDLL(found[1]), device
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self.call("cudaGetDeviceCount", ctypes.byref(ctypes.c_int()))
        self.call("cudaSetDevice", ctypes.c_int(device))
        self.version = self.number("cudaRuntimeGetVersion")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function, and end the run where it fails."""
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.cudaGetErrorString(status).decode()
            end, advice = CUDA_ENDS.get(status, (FAILED, ""))
            raise EndedError(end, f"{name}: {text}{advice}")

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function that gives a number."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def attribute(self, attribute: int) -> int:
        """Read an attribute of the GPU (cudaDeviceAttr)."""
        return self.number(
            "cudaDeviceGetAttribute", ctypes.c_int(attribute), ctypes.c_int(self.device)
        )

    def memory(self) -> tuple[int, int]:
        """Give the bytes of the GPU that are free, and all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def take(self, n_bytes: int) -> None:
        """Take GPU memory for good, by cudaMalloc."""
        if n_bytes:
            self.call("cudaMalloc", ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(n_bytes))

    def is_managed(self, address: int) -> bool:
        """Tell whether an address is of managed memory (cudaMemoryTypeManaged)."""
        attributes = (ctypes.c_int * 64)()  # its first member is the type
        self.call("cudaPointerGetAttributes", attributes, ctypes.c_void_p(address))
        return attributes[0] == 3

    def prefetch(self, place: tuple[int, int], stream: int) -> None:
        """Prefetch a range (address, bytes) to the GPU."""
        flags = (ctypes.c_uint(0),) if self.version >= 13000 else ()
        to = self._location(is_host=False)
        self.call("cudaMemPrefetchAsync", *_range(place), to, *flags, ctypes.c_void_p(stream))

    def advise(self, place: tuple[int, int], advice: str) -> None:
        """Give an advice of :data:`ADVICES` on a range."""
        where = self._location(is_host=advice == "preferred-cpu")
        self.call("cudaMemAdvise", *_range(place), ctypes.c_int(ADVICES[advice]), where)

    def _location(self, *, is_host: bool) -> Any:
        if self.version >= 13000:  # from CUDA 13 on a struct, before it a number
            return Location(2, 0) if is_host else Location(1, self.device)
        return ctypes.c_int(-1 if is_host else self.device)


def _range(place: tuple[int, int]) -> tuple[Any, Any]:
    return ctypes.c_void_p(place[0]), ctypes.c_size_t(place[1])


def facts_of(runtime: Runtime) -> dict[str, Any]:
    """Tell what the GPU is; end the run where managed memory does not fault and migrate."""
    numbers = {83: "managed_memory", 89: "concurrent_managed_access", 100: "uses_host_page_tables"}
    flags = {name: bool(runtime.attribute(number)) for number, name in numbers.items()}
    free, total = runtime.memory()
    if not flags["managed_memory"] or not flags["concurrent_managed_access"]:
        raise EndedError(
            SKIPPED,
            "this GPU or system (WSL?) cannot migrate managed memory while a kernel runs: use Linux and Pascal or newer",
        )
    if flags["uses_host_page_tables"]:
        raise EndedError(
            SKIPPED,
            "CPU and GPU share one page table here: there are no faults to see; use a GPU on PCIe",
        )
    capability = f"{runtime.attribute(75)}.{runtime.attribute(76)}"
    memory = {"total_bytes": total, "free_bytes": free}
    return {"ordinal": runtime.device, "compute_capability": capability, **memory, **flags}


def driver_facts(root: str = "/") -> dict[str, Any]:
    """Tell the version of the driver and the parameters of its module nvidia_uvm, as far as they can be read."""
    module = Path(root, "sys/module")
    version = _text(module / "nvidia/version")
    folder = module / "nvidia_uvm/parameters"
    parameters = {file.name: _text(file) for file in sorted(folder.glob("*"))}
    known = {name: text for name, text in parameters.items() if text is not None}
    return {"version": version, "uvm_parameters": known}


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return None


def is_profiled() -> bool:
    """Tell whether nsys profiles this process."""
    return any(os.environ.get(name) for name in _PROFILERS)
