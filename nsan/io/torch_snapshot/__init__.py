"""Memory snapshots of PyTorch: pickles, read in a child process that cannot do anything else.

The modules ``refusal``, ``limits``, ``opcodes``, ``columns``, ``possible``, ``paths``, ``stacks``,
``flatten`` and ``child`` run in that child and use the standard library only, as does this one, which
they import; ``reader``, ``frames``, ``versions``, ``about`` and ``fitting`` run here. ``writer`` writes snapshots that PyTorch can show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsan.io.torch_snapshot.frames import read_snapshot
    from nsan.io.torch_snapshot.writer import write_snapshot

__all__ = ["read_snapshot", "write_snapshot"]

_HOMES = {
    "read_snapshot": "nsan.io.torch_snapshot.frames",
    "write_snapshot": "nsan.io.torch_snapshot.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        msg = f"module 'nsan.io.torch_snapshot' has no attribute {name!r}"
        raise AttributeError(msg)
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
