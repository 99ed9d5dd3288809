"""Steps over more than the GPU has room for."""

from planting import Plant

from nsan.model.access import Stream
from nsan.model.making import Recipe, oversubscribed
from nsan.model.program import HostTouch, Launch, Operation, Program
from nsan.model.settings import DEFAULT_SETTINGS
from nsan.units import MIB
from plants.placement import filled, kernel, step


def swept(n_chunks: int, *, n_bytes: int = 48 * MIB, n_steps: int = 4) -> Program:
    """Go over an array in steps: over all of it in each, or chunk by chunk, all steps over one before the next."""
    size = n_bytes // n_chunks
    work: list[Operation] = []
    for chunk in range(n_chunks):
        stream = Stream(allocation="data", write=True, offset_bytes=chunk * size, n_bytes=size)
        work += step(Launch(kernel("scale", size, stream))) * n_steps
    return Program("swept", (*filled(data=n_bytes), *work, HostTouch("data")))


_TIGHT = oversubscribed(DEFAULT_SETTINGS, 48 * MIB, 1.5)

PLANTS = (
    Plant(
        "thrash",
        "capacity_thrash",
        Recipe(swept(1), _TIGHT),
        "data",
        Recipe(swept(2), _TIGHT),
    ),
)
CLEAN = ()
