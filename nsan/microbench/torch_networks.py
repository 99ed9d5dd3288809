"""The models that torch_uvm trains, and how much managed memory a step of theirs needs.

PyTorch is given, not imported; Python 3.9 or newer: it travels beside ``torch_uvm.py``.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

NETWORKS = {
    "cnn": "residual blocks of two 3x3 convolutions with batch norm",
    "transformer": "a causal language model of pre-norm blocks",
}
HEAD_WIDTH = 64
WORKSPACE_BYTES = 64 << 20
"""What cuBLAS and cuDNN ask the allocator for, about."""


def network(torch: Any, axes: Namespace) -> Any:
    """Build the model: a small residual CNN, or a small transformer language model."""
    nn: Any = torch.nn
    width = axes.width

    class Residual(nn.Module):  # type: ignore[misc]
        def __init__(self, *layers: Any) -> None:
            super().__init__()
            self.inner = nn.Sequential(*layers)

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    class Attention(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            n, length, _ = x.shape
            q, k, v = x.view(n, length, 3, -1, min(HEAD_WIDTH, width)).permute(2, 0, 3, 1, 4)
            made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return made.transpose(1, 2).reshape(n, length, width)

    def convolution(n_in: int) -> list[Any]:
        return [nn.Conv2d(n_in, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]

    if axes.network == "cnn":
        blocks = [Residual(*convolution(width), *convolution(width)[:2]) for _ in range(axes.depth)]
        ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
        return nn.Sequential(*convolution(3), *blocks, *ends)
    blocks = [
        nn.Sequential(
            Residual(nn.LayerNorm(width), nn.Linear(width, 3 * width), Attention(), nn.Linear(width, width)),
            Residual(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )
        for _ in range(axes.depth)
    ]  # fmt: skip
    head = [nn.LayerNorm(width), nn.Linear(width, axes.vocabulary, bias=False)]
    return nn.Sequential(nn.Embedding(axes.vocabulary, width), *blocks, *head)


def batch_of(torch: Any, axes: Namespace) -> tuple[Any, Any]:
    """Draw inputs and targets on the current default device."""
    if axes.network == "cnn":
        images = torch.randn(axes.batch, 3, axes.image, axes.image)
        return images, torch.randint(1000, (axes.batch,))
    tokens = torch.randint(axes.vocabulary, (axes.batch, axes.sequence + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(torch: Any, model: Any, given: Any, wanted: Any) -> Any:
    """Run the forward pass up to the cross entropy."""
    return torch.nn.functional.cross_entropy(model(given).flatten(0, -2), wanted.flatten())


def estimate(torch: Any, axes: Namespace) -> dict[str, int]:
    """Estimate the managed bytes of a step from the shapes alone, on PyTorch's meta device."""
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # noqa: SLF001 - tells storages without memory apart
        return tensor

    with torch.device("meta"):
        model = network(torch, axes)
        own = [p.untyped_storage() for p in model.parameters()]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(torch, model, *batch_of(torch, axes))
    del loss
    for storage in own:
        saved.pop(storage._cdata, None)  # noqa: SLF001
    sizes = [storage.nbytes() for storage in saved.values()]
    parameters = sum(storage.nbytes() for storage in own)
    # Weights, gradients and momentum; what the backward pass needs; two gradients of the largest activation.
    managed = 3 * parameters + sum(sizes) + 2 * max(sizes) + WORKSPACE_BYTES
    return {"managed_bytes": managed, "parameter_bytes": parameters, "saved_bytes": sum(sizes)}
