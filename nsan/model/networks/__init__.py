"""Training steps of well-known networks as tensor programs: what they do to GPU memory, and in which order.

``tensors`` has the words of a tensor program and its checker, ``layers`` the types of layer tables, ``alexnet``,
``resnet``, ``bert`` and ``gpt2`` the tables; ``tape`` writes a program down, ``image_layers``, ``text_layers`` and
``attention`` know forward and backward of each layer, ``passes`` of the whole tree; ``training`` makes the steps.
Everything here is modelled. No address and no allocator appears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nsan.errors import ProgramError
from nsan.model.networks.alexnet import ALEXNET
from nsan.model.networks.bert import BERT_BASE
from nsan.model.networks.gpt2 import GPT2_SMALL
from nsan.model.networks.layers import Network
from nsan.model.networks.resnet import RESNET_8, RESNET_50
from nsan.model.networks.tensors import TensorProgram
from nsan.model.networks.training import Training, training_program

__all__ = [
    "NETWORKS",
    "SMALL",
    "Network",
    "TensorProgram",
    "Trainable",
    "Training",
    "training_program",
]


@dataclass(frozen=True)
class Trainable:
    """A network by name, and its training steps.

    Attributes
    ----------
    network : Network
        The layer table.
    description : str
        One line for users.
    """

    network: Network
    description: str

    @property
    def name(self) -> str:
        """Name that users type."""
        return self.network.name

    @property
    def has_sequence(self) -> bool:
        """Whether it takes texts; else it takes images."""
        return self.network.is_text

    def build(
        self,
        *,
        steps: int = 2,
        batch: int | None = None,
        sequence: int | None = None,
        image: int | None = None,
        varying: bool = False,
        seed: int = 0,
    ) -> TensorProgram:
        """Write down training steps.

        Parameters
        ----------
        steps : int, default 2
            Training steps.
        batch : int, optional
            Images or texts per step; by default the network's.
        sequence, image : int, optional
            Tokens per text, or pixels a side, whichever the network takes; by default the network's.
        varying : bool, default False
            The length of the texts, or the batch of images, changes from step to step.
        seed : int, default 0
            Of what varies.

        Returns
        -------
        TensorProgram
            See :func:`nsan.model.networks.training.training_program`.

        Raises
        ------
        ProgramError
            If a number is out of its bounds, or of a kind that the network does not take.
        """
        extent, other = (sequence, image) if self.has_sequence else (image, sequence)
        if other is not None:
            takes, not_takes = ("texts", "images") if self.has_sequence else ("images", "texts")
            problem = f"{self.name} takes {takes}, and a size of {not_takes} is given"
            raise ProgramError(problem, "Leave that out")
        training = Training(batch, extent, steps=steps, varying=varying, seed=seed)
        return training_program(self.network, training)


NETWORKS: Final = (
    Trainable(ALEXNET, "AlexNet, 61.1 M parameters, images, SGD with momentum"),
    Trainable(RESNET_50, "ResNet-50, 25.6 M parameters, images, SGD with momentum"),
    Trainable(BERT_BASE, "BERT-base encoder, 109.5 M parameters, texts, AdamW"),
    Trainable(GPT2_SMALL, "GPT-2 small, 124.4 M parameters, texts, AdamW"),
)
"""What can be trained: networks as the papers train them."""

SMALL: Final = (
    Trainable(RESNET_8, "ResNet-8, 0.08 M parameters, small images, SGD with momentum"),
)
"""What can be trained, too: small enough for a sample or a first try."""
