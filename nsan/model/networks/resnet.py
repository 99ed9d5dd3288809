"""ResNet-50 as in torchvision (stride in the 3 x 3 convolution): 25 557 032 parameters."""

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
    shortcut = (
        Conv2d(f"{name}.downsample.0", n_in, n_out, 1, stride=stride),
        BatchNorm2d(f"{name}.downsample.1", n_out),
    )
    changes = stride != 1 or n_in != n_out
    add = Residual(
        f"{name}.add",
        Sequence(f"{name}.main", main),
        Sequence(f"{name}.downsample", shortcut) if changes else None,
        inplace=True,
    )
    return Sequence(name, (add, Relu(f"{name}.relu3")))


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
