"""One pointer for all arrays of the engine.

A function that takes 45 arrays takes long to compile, and so does each that it calls; with a pointer
the engine compiles in half the time.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.experimental import structref

from nsan.model.engine.jit import entry
from nsan.model.engine.state import Chunks, Gpu, Log, Memory, Queue, Scratch, State


class _Pointer(types.StructRef):  # type: ignore[misc]
    """A record by reference."""

    def preprocess_fields(self, fields: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
        """Keep no literal types, so that equal arrays give equal pointers."""
        return tuple((name, types.unliteral(kind)) for name, kind in fields)


def _pointer(parts: Any) -> Any:
    """Make the type of a pointer to the fields of a named tuple; give its constructor."""
    own = {"__module__": __name__, "__doc__": f"The arrays of {parts.__name__}, by reference."}
    kind = structref.register(type(f"{parts.__name__}Pointer", (_Pointer,), own))
    globals()[kind.__name__] = kind  # numba's cache finds the type by its name here
    proxy = type(parts.__name__, (structref.StructRefProxy,), own)
    structref.define_proxy(proxy, kind, list(parts._fields))
    return proxy


_MEMORY = _pointer(Memory)
_CHUNKS = _pointer(Chunks)
_GPU = _pointer(Gpu)
_QUEUE = _pointer(Queue)
_SCRATCH = _pointer(Scratch)
_LOG = _pointer(Log)
_STATE = _pointer(State)


@entry
def pointer_to(state: State) -> Any:
    """Point to the arrays of a state; both see the same memory."""
    return _STATE(
        _MEMORY(*state.memory),
        _CHUNKS(*state.chunks),
        _GPU(*state.gpu),
        state.host,
        _QUEUE(*state.queue),
        _SCRATCH(*state.scratch),
        _LOG(*state.log),
    )
