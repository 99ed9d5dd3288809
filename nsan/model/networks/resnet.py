"""ResNet-50 as in torchvision (stride in the 3 x 3 convolution): 25 557 032 parameters; and the least, ResNet-8."""

from __future__ import annotations

from typing import Final

from nsan.model.networks.layers import (
    AdaptiveAveragePool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    Layer,
    Linear,
    MaxPool2d,
    Network,
    Relu,
    Residual,
    Sequence,
)

EXPANSION: Final = 4
STAGES: Final = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Inner width, number of blocks, stride of the first block."""

SMALL_STAGES: Final = ((16, 1), (32, 2), (64, 2))
"""Width and stride of each block of ResNet-8."""


def _bottleneck(name: str, n_in: int, width: int, stride: int) -> Sequence:
    n_out = EXPANSION * width
    main = (
        Conv2d(f"{name}.conv1", n_in, width, 1),
        BatchNorm2d(f"{name}.bn1", width),
        Relu(f"{name}.relu1"),
        Conv2d(f"{name}.conv2", width, width, 3, stride=stride, padding=1),
        BatchNorm2d(f"{name}.bn2", width),
        Relu(f"{name}.relu2"),
        Conv2d(f"{name}.conv3", width, n_out, 1),
        BatchNorm2d(f"{name}.bn3", n_out),
    )
    return Sequence(name, (_added(name, main, n_in, n_out, stride), Relu(f"{name}.relu3")))


def _basic(name: str, n_in: int, n_out: int, stride: int) -> Sequence:
    main = (
        Conv2d(f"{name}.conv1", n_in, n_out, 3, stride=stride, padding=1),
        BatchNorm2d(f"{name}.bn1", n_out),
        Relu(f"{name}.relu1"),
        Conv2d(f"{name}.conv2", n_out, n_out, 3, padding=1),
        BatchNorm2d(f"{name}.bn2", n_out),
    )
    return Sequence(name, (_added(name, main, n_in, n_out, stride), Relu(f"{name}.relu2")))


def _added(name: str, main: tuple[Layer, ...], n_in: int, n_out: int, stride: int) -> Residual:
    """Add the input of a block to what its layers make of it; by a projection where the shape changes."""
    shortcut = (
        Conv2d(f"{name}.downsample.0", n_in, n_out, 1, stride=stride),
        BatchNorm2d(f"{name}.downsample.1", n_out),
    )
    changes = stride != 1 or n_in != n_out
    return Residual(
        f"{name}.add",
        Sequence(f"{name}.main", main),
        Sequence(f"{name}.downsample", shortcut) if changes else None,
        inplace=True,
    )


def _stages() -> tuple[Sequence, ...]:
    found, n_in = [], 64
    for number, (width, n_blocks, stride) in enumerate(STAGES, start=1):
        blocks: list[Layer] = []
        for block in range(n_blocks):
            name = f"layer{number}.{block}"
            blocks.append(_bottleneck(name, n_in, width, stride if block == 0 else 1))
            n_in = EXPANSION * width
        found.append(Sequence(f"layer{number}", tuple(blocks)))
    return tuple(found)


def _small_stages() -> tuple[Sequence, ...]:
    found, n_in = [], SMALL_STAGES[0][0]
    for number, (width, stride) in enumerate(SMALL_STAGES, start=1):
        found.append(_basic(f"layer{number}.0", n_in, width, stride))
        n_in = width
    return tuple(found)


RESNET_50: Final = Network(
    name="resnet-50",
    body=Sequence(
        "resnet-50",
        (
            Conv2d("conv1", 3, 64, 7, stride=2, padding=3),
            BatchNorm2d("bn1", 64),
            Relu("relu"),
            MaxPool2d("maxpool", 3, 2, padding=1),
            *_stages(),
            AdaptiveAveragePool2d("avgpool", 1),
            Flatten("flatten"),
            Linear("fc", 2048, 1000),
        ),
    ),
    loss="cross entropy",
    optimizer="sgd",
    batch=8,
    extent=224,
    smallest=64,
    largest=4096,
    inputs=("images", "labels"),
)
"""SGD with momentum. Default: batch 8 of 224 x 224."""

RESNET_8: Final = Network(
    name="resnet-8",
    body=Sequence(
        "resnet-8",
        (
            Conv2d("conv1", 3, 16, 3, padding=1),
            BatchNorm2d("bn1", 16),
            Relu("relu"),
            *_small_stages(),
            AdaptiveAveragePool2d("avgpool", 1),
            Flatten("flatten"),
            Linear("fc", 64, 10),
        ),
    ),
    loss="cross entropy",
    optimizer="sgd",
    batch=64,
    extent=32,
    smallest=32,
    largest=4096,
    inputs=("images", "labels"),
)
"""The network of He et al. (2016, section 4.2) for images of 32 x 32 with one block a stage, and projections
where the shape changes: 78 042 parameters. SGD with momentum. Default: batch 64 of 32 x 32."""
