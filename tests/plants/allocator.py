"""Programs whose allocator is the problem: memory given back in every step, dead traffic, fragments."""

from planting import Plant

from nsan.model.access import Stream
from nsan.model.making import Recipe
from nsan.model.networks import tensors as t
from nsan.model.placing import placed
from nsan.model.program import (
    Allocate,
    Free,
    HostTouch,
    Kernel,
    Launch,
    Prefetch,
    Program,
    Synchronize,
)
from nsan.model.settings import Settings
from nsan.model.sweep import Case, recipe
from nsan.model.workloads import NETWORKS
from nsan.model.workloads.training import TrainingRun
from nsan.units import MIB

_WEIGHTS, _SCRATCH, _LAYERS = 4 * MIB, 16 * MIB, 6


def _layers(*, keeps):
    """Layers that share weights and need scratch memory: made for each of them, or once."""
    reads, writes = Stream(allocation="weights"), Stream(allocation="scratch", write=True)
    kernel = Kernel("layer", _SCRATCH // 1024, 256, (reads, writes))
    made, gone = Allocate("scratch", _SCRATCH), Free("scratch")
    layer = [Launch(kernel), Synchronize()]
    layers = [made, *layer * _LAYERS, gone] if keeps else [made, *layer, gone] * _LAYERS
    start = (
        Allocate("weights", _WEIGHTS),
        HostTouch("weights", write=True),
        Prefetch("weights"),
    )
    return Recipe(Program("layers", (*start, *layers)))


def _resnet(allocator, factor):
    case = Case(factor, allocator, "none")
    return recipe(NETWORKS["resnet-8"], TrainingRun(steps=3), Settings(), case)


def _phases(allocator, *, n_steps=4, sizes=(40 * MIB, 48 * MIB), flops=2e10):
    """Two phases that need memory of different sizes: each fits, but the cache keeps that of both."""
    operations = []
    for i in range(n_steps):
        operations.append(t.Step(i + 1))
        for phase, n_bytes in zip(("encode", "decode"), sizes, strict=True):
            name = f"{phase}#{i}"
            operations += [
                t.Create(t.Tensor(name, n_bytes, "activation")),
                *[t.Compute(phase, (name,), (name,), flops)] * 2,
                t.Drop(name),
            ]
    made = placed(t.TensorProgram("phases", tuple(operations)), allocator, Settings().gpu_profile)
    return Recipe(made.program, Settings(capacity_bytes=52 * MIB), placed=made)


def _growing(*, n_steps=8, n_bytes=12 * MIB, more=4 * MIB, flops=1e13):
    """Each step needs a somewhat larger tensor: what is cached of the steps before is too small."""
    operations = []
    for i in range(n_steps):
        name = f"activation#{i}"
        operations += [
            t.Step(i + 1),
            t.Create(t.Tensor(name, n_bytes + i * more, "activation")),
            t.Compute("forward", (), (name,), flops),
            t.Drop(name),
        ]
    made = placed(t.TensorProgram("growing", tuple(operations)), "caching", Settings().gpu_profile)
    return Recipe(made.program, placed=made)


PLANTS = (
    Plant(
        "scratch-made-anew",
        "allocator_returns_memory",
        _layers(keeps=False),
        "scratch",
        _layers(keeps=True),
    ),
    Plant(
        "tensors-made-anew",
        "allocator_returns_memory",
        _resnet("raw", 0.5),
        "",
        _resnet("caching", 0.5),
    ),
    Plant(
        "dead-cache",
        "dead_cache_traffic",
        _phases("caching"),
        "segment 0",
        _phases("caching:drop"),
    ),
    Plant("fragments", "fragmentation", _growing()),
)
CLEAN = ()
