"""GPT-2 small (124M): 124 439 808 parameters, the head sharing the token embedding.

The operations are those of nanoGPT's ``model.py`` with its plain attention (biases on, dropout 0.1 as GPT-2 was
trained, an fp32 causal mask stored per layer): one kernel for gelu, the loss over a view of all logits.
"""

from __future__ import annotations

from typing import Final

from nsan.model.networks.layers import (
    Attention,
    Dropout,
    Embeddings,
    Gelu,
    LayerNorm,
    Linear,
    Network,
    Residual,
    Sequence,
    Table,
)

N_LAYERS: Final = 12
N_HEADS: Final = 12
WIDTH: Final = 768
N_TOKENS: Final = 50_257
N_POSITIONS: Final = 1_024


def _block(name: str) -> Sequence:
    joined = (Linear(f"{name}.attn.c_attn", WIDTH, 3 * WIDTH),)
    attention = (
        Attention(f"{name}.attn", WIDTH, N_HEADS, joined, n_causal=N_POSITIONS),
        Linear(f"{name}.attn.c_proj", WIDTH, WIDTH),
        Dropout(f"{name}.attn.resid_dropout"),
    )
    feed_forward = (
        Linear(f"{name}.mlp.c_fc", WIDTH, 4 * WIDTH),
        Gelu(f"{name}.mlp.gelu"),
        Linear(f"{name}.mlp.c_proj", 4 * WIDTH, WIDTH),
        Dropout(f"{name}.mlp.dropout"),
    )
    first = (LayerNorm(f"{name}.ln_1", WIDTH), Sequence(f"{name}.attn", attention))
    second = (LayerNorm(f"{name}.ln_2", WIDTH), Sequence(f"{name}.mlp", feed_forward))
    return Sequence(
        name,
        (
            Residual(f"{name}.add_1", Sequence(f"{name}.first", first)),
            Residual(f"{name}.add_2", Sequence(f"{name}.second", second)),
        ),
    )


TABLES: Final = (
    Table("wte", N_TOKENS, WIDTH, "tokens"),
    Table("wpe", N_POSITIONS, WIDTH, "positions"),
)

GPT2_SMALL: Final = Network(
    name="gpt2-small",
    body=Sequence(
        "gpt2-small",
        (
            Embeddings("embeddings", TABLES),
            Dropout("drop"),
            *(_block(f"h.{number}") for number in range(N_LAYERS)),
            LayerNorm("ln_f", WIDTH),
            Linear("lm_head", WIDTH, N_TOKENS, bias=False, tied_to="wte.weight"),
        ),
    ),
    loss="cross entropy",
    optimizer="adamw",
    batch=1,
    extent=256,
    smallest=2,
    largest=N_POSITIONS,
    inputs=("tokens", "labels"),
)
"""AdamW. Default: batch 1 of 256 tokens."""
