"""Constants of the UVM driver, with their source, and the numbers that nsys writes for its enumerations.

Driver values are the defaults of ``NVIDIA/open-gpu-kernel-modules`` 595.45.04, folder
``kernel-open/nvidia-uvm``; the file is named beside each. Enumeration numbers are CUPTI's
(``cupti_activity.h``, CUDA 13.0), as nsys exports them. Decide by number, never by label: labels
differ between nsys versions and one of them is misspelt.
"""

from __future__ import annotations

from typing import Final

PAGE_BYTES: Final = 4 << 10
"""Page size on x86-64, byte; the unit in which residency is tracked."""

BIG_PAGE_BYTES: Final = 64 << 10
"""Big page, byte: the leaf of the prefetch tree (``uvm_va_block_types.h``)."""

VA_BLOCK_BYTES: Final = 2 << 20
"""VA block, byte: naturally aligned, the unit of service and of eviction (``uvm_va_block_types.h``)."""

FAULT_BATCH_SIZE: Final = 256
"""Most fault-buffer entries in one batch (``uvm_gpu_replayable_faults.c``)."""

PUSH_GAPS_NS: Final = (0, 1)
"""Gaps between chained copies of one push: 0 in CUPTI, 1 ns in nsys (measured, 46 captures)."""

COPY_KIND_UM_HTOD: Final = 11
COPY_KIND_UM_DTOH: Final = 12
COPY_KIND_UM_DTOD: Final = 13

DIRECTIONS: Final = {
    COPY_KIND_UM_HTOD: "htod",
    COPY_KIND_UM_DTOH: "dtoh",
    COPY_KIND_UM_DTOD: "dtod",
}
"""Direction of a migration by ``copyKind``."""

COPY_KINDS: Final = {
    0: "unknown",
    1: "htod",
    2: "dtoh",
    3: "htoa",
    4: "atoh",
    5: "atoa",
    6: "atod",
    7: "dtoa",
    8: "dtod",
    9: "htoh",
    10: "ptop",
}
"""Explicit copies by ``copyKind``."""

CAUSE_USER: Final = 1
CAUSE_COHERENCE: Final = 2
CAUSE_PREFETCH: Final = 3
CAUSE_EVICTION: Final = 4

CAUSES: Final = {
    0: "unknown",
    CAUSE_USER: "user",
    CAUSE_COHERENCE: "coherence",
    CAUSE_PREFETCH: "prefetch",
    CAUSE_EVICTION: "eviction",
    5: "access_counters",
}
"""Migration causes by ``migrationCause``; the nsys UI calls 2 "page fault"."""

ACCESSES: Final = {0: "unknown", 1: "read", 2: "write", 3: "atomic", 4: "prefetch"}
"""Access types by ``faultAccessType``."""

MEMORY_KINDS: Final = {
    0: "pageable",
    1: "pinned",
    2: "device",
    3: "array",
    4: "managed",
    5: "device_static",
    6: "managed_static",
    7: "unknown",
}
"""Memory kinds by ``memKind``."""

MANAGED_KINDS: Final = ("managed", "managed_static")
"""Kinds of :data:`MEMORY_KINDS` that page faults and migrations can concern."""
