"""Training steps of a known network under an allocator, as the driver sees them."""

from __future__ import annotations

from dataclasses import dataclass

from nsan.errors import ProgramError
from nsan.model.hints import Hint
from nsan.model.networks import Trainable
from nsan.model.placing import Placed, placed
from nsan.model.profiles import GpuProfile


@dataclass(frozen=True)
class TrainingRun:
    """How a network is trained.

    Attributes
    ----------
    steps : int, default 2
        Training steps.
    batch, sequence, image : int, optional
        Samples per step, tokens in each or pixels a side; by default what the network says.
    varying : bool, default False
        Batch or sequence length changes from step to step, up to these.
    allocator : str, default "caching"
        As :func:`nsan.model.allocator_names.parse_allocator` reads it.
    hints : tuple of Hint
        Prefetches and advice.
    seed : int, default 1
        Of what varies.
    """

    steps: int = 2
    batch: int | None = None
    sequence: int | None = None
    image: int | None = None
    varying: bool = False
    allocator: str = "caching"
    hints: tuple[Hint, ...] = ()
    seed: int = 1


def trained(network: Trainable, run: TrainingRun, gpu: GpuProfile) -> Placed:
    """Make the program of a training run.

    Parameters
    ----------
    network : Trainable
        What is trained.
    run : TrainingRun
        How.
    gpu : GpuProfile
        Decides how long kernels compute.

    Returns
    -------
    Placed
        Program for the driver model, and the allocator's history.

    Raises
    ------
    ProgramError
        If a size is out of its bounds, or of a kind that the network does not take.
    """
    batch = network.network.batch if run.batch is None else run.batch
    if run.varying and not network.has_sequence and batch == 1:
        raise ProgramError("Batches of one image cannot vary", "Take a larger --batch")
    tensors = network.build(
        steps=run.steps,
        batch=run.batch,
        sequence=run.sequence,
        image=run.image,
        varying=run.varying,
        seed=run.seed,
    )
    return placed(tensors, run.allocator, gpu, hints=run.hints)
