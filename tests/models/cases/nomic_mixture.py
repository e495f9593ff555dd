"""Nomic Embed 2, of which transformers has no model: a small one, and its embedding by the published code's maths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models.cases import tiny, tiny_pooling

CONFIG: dict[str, Any] = {
    **{key: value for key, value in tiny_pooling.NOMIC_KEYS.items() if value is not None},
    **{"architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": tiny.VOCAB, "type_vocab_size": 1},
    **{"activation_function": "gelu", "qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True},
    **{"moe_every_n_layers": 2, "num_experts": 4, "moe_top_k": 2, "moe_impl": "megablocks", "ffn_div": 1},
    **{"moe_normalize_expert_weights": False, "num_shared_experts": 0, "expert_choice_router": False},
}
"""Keys of nomic-embed-text-v2-moe; transformers has no such model."""


def tensors() -> dict[str, torch.Tensor]:
    width, inner, noise = 32, 48, torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (tiny.VOCAB, width),
        "embeddings.token_type_embeddings.weight": (1, width),
        "emb_ln.weight": (width,),
        "emb_ln.bias": (width,),
    }
    for layer in range(3):
        name = f"encoder.layers.{layer}"
        linears = {"attn.Wqkv": (3 * width, width), "attn.out_proj": (width, width)}
        if layer % 2:
            shapes[f"{name}.mlp.router.layer.weight"] = (4, width)
            shapes |= {f"{name}.mlp.experts.mlp.{part}": (4 * inner, width) for part in ("w1", "w2")}
            shapes[f"{name}.mlp.experts.bias"] = (width,)
        else:
            linears |= {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
        shapes |= {f"{name}.{part}.weight": shape for part, shape in linears.items()}
        shapes |= {f"{name}.{part}.bias": shape[:1] for part, shape in linears.items()}
        shapes |= {f"{name}.{norm}.{part}": (width,) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
    return {name: torch.randn(*shape, generator=noise) / 4 + ("norm" in name) for name, shape in shapes.items()}


def embedding(state: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """The first token's hidden state, by the published code's maths."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, (32,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-12)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    angles = torch.arange(len(tokens))[:, None, None] * 1000.0 ** (-torch.arange(4) / 4)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :4], x[..., 4:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = state["embeddings.word_embeddings.weight"][tokens] + state["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "emb_ln")
    for layer in range(3):
        name = f"encoder.layers.{layer}"
        q, k, v = linear(x, f"{name}.attn.Wqkv").view(-1, 3, 4, 8).unbind(1)
        scores = torch.einsum("qnh,knh->nqk", rotated(q), rotated(k)) / 8**0.5
        mixed = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v).flatten(1)
        x = norm(x + linear(mixed, f"{name}.attn.out_proj"), f"{name}.norm1")
        if not layer % 2:
            out = linear(F.gelu(linear(x, f"{name}.mlp.fc1")), f"{name}.mlp.fc2")
        else:
            weights, chosen = (x @ state[f"{name}.mlp.router.layer.weight"].T).softmax(-1).topk(2)
            w1, w2 = (state[f"{name}.mlp.experts.mlp.{part}"].view(4, 48, 32) for part in ("w1", "w2"))
            outputs = torch.einsum("tef,efd->ted", F.gelu(torch.einsum("td,efd->tef", x, w1)), w2)
            picked = outputs.gather(1, chosen[:, :, None].expand(-1, -1, 32))
            out = (picked * weights[:, :, None]).sum(1) + state[f"{name}.mlp.experts.bias"]
        x = norm(x + out, f"{name}.norm2")
    return x[0]
