"""AlexNet as in torchvision (the one-tower variant of 2014): 61 100 840 parameters."""

from __future__ import annotations

from typing import Final

from nsan.model.networks.layers import (
    AdaptiveAveragePool2d,
    Conv2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Network,
    Relu,
    Sequence,
)

FEATURES: Final = Sequence(
    "features",
    (
        Conv2d("features.0", 3, 64, 11, stride=4, padding=2, bias=True),
        Relu("features.1"),
        MaxPool2d("features.2", 3, 2),
        Conv2d("features.3", 64, 192, 5, padding=2, bias=True),
        Relu("features.4"),
        MaxPool2d("features.5", 3, 2),
        Conv2d("features.6", 192, 384, 3, padding=1, bias=True),
        Relu("features.7"),
        Conv2d("features.8", 384, 256, 3, padding=1, bias=True),
        Relu("features.9"),
        Conv2d("features.10", 256, 256, 3, padding=1, bias=True),
        Relu("features.11"),
        MaxPool2d("features.12", 3, 2),
    ),
)

CLASSIFIER: Final = Sequence(
    "classifier",
    (
        Dropout("classifier.0", 0.5),
        Linear("classifier.1", 256 * 6 * 6, 4096),
        Relu("classifier.2"),
        Dropout("classifier.3", 0.5),
        Linear("classifier.4", 4096, 4096),
        Relu("classifier.5"),
        Linear("classifier.6", 4096, 1000),
    ),
)

ALEXNET: Final = Network(
    name="alexnet",
    body=Sequence(
        "alexnet",
        (FEATURES, AdaptiveAveragePool2d("avgpool", 6), Flatten("flatten"), CLASSIFIER),
    ),
    loss="cross entropy",
    optimizer="sgd",
    batch=32,
    extent=224,
    smallest=64,
    largest=4096,
    inputs=("images", "labels"),
)
"""SGD with momentum. Default: batch 32 of 224 x 224."""
