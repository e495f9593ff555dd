"""Parts exchanged in a transformers model, for architectures that transformers has no whole model of."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _modeling(family: str) -> Any:
    """Return a family's module of transformers: all together take seconds to import, which most runs need not pay."""
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _llama_mlp(width: int, inner: int) -> nn.Module:
    llama = _modeling("llama")
    return llama.LlamaMLP(llama.LlamaConfig(hidden_size=width, intermediate_size=inner))


def deepseek_experts(model: PreTrainedModel) -> None:
    """A mixture with softmax scores and shared experts in every layer but the first."""
    deepseek = _modeling("deepseek_v2")
    config = deepseek.DeepseekV2Config(
        hidden_size=model.config.hidden_size,
        moe_intermediate_size=20,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=3,
    )
    config._experts_implementation = "eager"
    for layer in model.model.layers[1:]:
        layer.mlp = deepseek.DeepseekV2Moe(config)


def deepseek_experts_and_unit_head(model: PreTrainedModel) -> None:
    """The same, and a head whose columns are unit vectors."""
    deepseek_experts(model)
    _normalise_head(model, axis=0)


def _normalise_head(model: PreTrainedModel, axis: int) -> None:
    def unit(module: nn.Module, args: Any) -> None:
        module.weight.data = nn.functional.normalize(module.weight.data, dim=axis)

    model.lm_head.register_forward_pre_hook(unit)


def sandwich(model: PreTrainedModel) -> None:
    """A norm after each mixer and each ffn."""
    width, eps, norm = model.config.hidden_size, model.config.rms_norm_eps, _modeling("deepseek_v2").DeepseekV2RMSNorm
    for layer in model.model.layers:
        layer.self_attn.o_proj = nn.Sequential(layer.self_attn.o_proj, norm(width, eps))
        layer.mlp = nn.Sequential(layer.mlp, norm(width, eps))


def biased_outputs(model: PreTrainedModel) -> None:
    """Biases on the last matrices of mixers and ffns."""
    for layer in model.model.layers:
        for module, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            matrix = getattr(module, name)
            setattr(module, name, nn.Linear(matrix.in_features, matrix.out_features, bias=True))


def alibi(model: PreTrainedModel) -> None:
    """ALiBi instead of RoPE, by four heads, and a head of unit vectors."""
    _positions_by_distance(model, lambda distance: distance)
    _normalise_head(model, axis=1)


def root_alibi(model: PreTrainedModel) -> None:
    """The same by the root of the distance, with a plain head."""
    _positions_by_distance(model, torch.sqrt)


def _positions_by_distance(model: PreTrainedModel, of_distance: Callable[[Tensor], Tensor]) -> None:

    def unrotated(module: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.ones_like(output[0]), torch.zeros_like(output[1])

    def biased(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = kwargs["input_ids"].shape[1]
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
        bias = -slopes * of_distance(distance.clamp(min=0).float())
        mask = torch.where(distance >= 0, bias, torch.finfo(torch.float32).min)
        return args, {**kwargs, "attention_mask": mask[None]}

    model.model.rotary_emb.register_forward_hook(unrotated)
    model.model.register_forward_pre_hook(biased, with_kwargs=True)


class _GatedMlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gated_layers = nn.Linear(width, 2 * inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gated_layers(x).chunk(2, -1)
        return nn.functional.gelu(gate) * up


class _NoPositions(nn.Module):
    def forward(self, positions: Tensor) -> float:
        return 0.0


def jina_bert(model: PreTrainedModel) -> None:
    """A BERT of four heads with a gated MLP, whose scores fall with the distance on both sides."""

    def biased(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = torch.arange(args[0].shape[1])
        slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
        bias = -slopes * (tokens[:, None] - tokens).abs()
        return args[:1], {**kwargs, "attention_mask": bias[None]}

    config, bert = model.config, getattr(model, "bert", model)
    bert.embeddings.position_embeddings = _NoPositions()
    for layer in bert.encoder.layer:
        layer.intermediate = _GatedMlp(config.hidden_size, config.intermediate_size)
        layer.attention.self.register_forward_pre_hook(biased, with_kwargs=True)


def blended(model: PreTrainedModel) -> None:
    """Layer 2 reads a blend with what came before layer 0, layer 3 one with what came before layer 1."""
    kept: dict[int, Tensor] = {}

    def hook(index: int) -> Callable[..., Any]:
        def blend(module: nn.Module, args: Any) -> Any:
            x, *rest = args
            kept[index] = x
            return (0.8 * kept[index - 2] + 0.2 * x if index >= 2 else x, *rest)

        return blend

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(hook(index))


class _Nothing(nn.Module):
    """An attention or MLP that adds nothing."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self.attends else zeros


def pruned(model: PreTrainedModel) -> None:
    """Of six layers: 1 without attention, 2 without MLP, 3 without both; 4 with one KV head and another MLP."""
    layers, width = model.model.layers, model.config.hidden_size
    for index in (1, 3):
        layers[index].self_attn, layers[index].input_layernorm = _Nothing(attends=True), nn.Identity()
    for index in (2, 3):
        layers[index].mlp, layers[index].post_attention_layernorm = _Nothing(attends=False), nn.Identity()
    attention = layers[4].self_attn
    attention.num_key_value_groups = model.config.num_attention_heads
    for name in ("k_proj", "v_proj"):
        setattr(attention, name, nn.Linear(width, attention.head_dim, bias=False))
    layers[4].mlp = _llama_mlp(width, 256)


def arctic(model: PreTrainedModel) -> None:
    """The last layer has a further MLP, and its experts read what the layer reads; those before have a plain MLP."""
    width, eps = model.config.hidden_size, model.config.rms_norm_eps
    *others, sparse = model.model.layers
    for dense in others:
        dense.mlp = _llama_mlp(width, model.config.intermediate_size)
    sparse.residual = nn.ModuleDict({"mlp": _llama_mlp(width, width)})
    sparse.residual_layernorm = _modeling("llama").LlamaRMSNorm(width, eps)

    def forward(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x = hidden_states
        attended = x + sparse.self_attn(hidden_states=sparse.input_layernorm(x), **kwargs)[0]
        routed = sparse.mlp(sparse.post_attention_layernorm(x))
        return attended + sparse.residual["mlp"](sparse.residual_layernorm(attended)) + routed

    sparse.forward = forward


def step3p5(model: PreTrainedModel) -> None:
    """The text model of Step 3.7."""
    step = _modeling("step3p7")
    config = step.Step3p7TextConfig(
        **{key: getattr(model.config, key) for key in ("vocab_size", "hidden_size", "intermediate_size")},
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_other_setting={"num_attention_heads": 6},
        sliding_window=7,
        moe_layers_enum="1,2",
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        share_expert_dim=24,
        moe_router_scaling_factor=1.7,
        swiglu_limits=[0.0, 0.0, 0.5],
        swiglu_limits_shared=[0.3, 0.0, 0.4],
        rope_theta=[1e4, 1e3, 1e4],
        partial_rotary_factors=[0.5, 1.0, 0.5],
        rope_scaling=LLAMA3,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model.model = step.Step3p7TextModel(config)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
    "original_max_position_embeddings": 32,
}


def chunked(model: PreTrainedModel) -> None:
    """Local layers attend to their own chunk of 4 tokens and the one before."""

    def masked(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = torch.arange(kwargs["input_ids"].shape[1])
        seen = positions[:, None] >= positions
        near = seen & (positions[:, None] // 4 - positions // 4 <= 1)
        least = torch.finfo(torch.float32).min
        masks = {kind: torch.where(mask, 0.0, least)[None, None] for kind, mask in zip(_KINDS, (seen, near))}
        return args, {**kwargs, "attention_mask": masks}

    model.model.register_forward_pre_hook(masked, with_kwargs=True)


_KINDS = ("full_attention", "sliding_attention")


class LightningAttention(nn.Module):
    """Ling 2.5's linear attention, written as attention whose scores decay with the distance."""

    def __init__(self, width: int, heads: int, head_dim: int, depth: float, groups: int, eps: float) -> None:
        super().__init__()
        self.heads, self.groups, self.depth = heads, groups, depth
        self.query_key_value = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.g_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.dense = nn.Linear(heads * head_dim, width, bias=False)
        norm = _modeling("llama").LlamaRMSNorm
        self.query_layernorm, self.key_layernorm = norm(head_dim, eps), norm(head_dim, eps)
        self.g_norm = norm(heads * head_dim, eps)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.query_key_value(hidden_states).chunk(3, -1))
        q, k = self._rotated(self.query_layernorm(q)), self._rotated(self.key_layernorm(k))
        positions = torch.arange(q.shape[1])
        distance = (positions[:, None] - positions).double()
        slopes = torch.tensor([2 ** (-8 * (head + 1) / self.heads) for head in range(self.heads)]).double() * self.depth
        decay = torch.where(distance >= 0, torch.exp(-slopes[:, None, None] * distance), 0.0)
        scores = torch.einsum("btnh,bsnh->bnts", q.double(), k.double()) * q.shape[-1] ** -0.5 * decay
        heads = torch.einsum("bnts,bsnh->btnh", scores, v.double()).flatten(2).float()
        grouped = heads.unflatten(-1, (self.groups, -1))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.g_norm.variance_epsilon)
        gate = self.g_proj(hidden_states).sigmoid()
        return self.dense(self.g_norm.weight * grouped.flatten(2) * gate), None

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotate the first half of each head, whose channel i pairs with channel i + a quarter of the head."""
        half = x.shape[-1] // 2
        frequencies = 1e3 ** -(torch.arange(0, half, 2).double() / half)
        angles = torch.arange(x.shape[1])[:, None, None] * frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second, rest = x.split([half // 2, half // 2, x.shape[-1] - half], -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def lightning_attention(model: PreTrainedModel) -> None:
    """Ling 2.5's linear attention in every layer that is not the last of two."""
    config, layers = model.config, model.model.layers
    for index in range(0, len(layers), 2):
        depth = 1 - (index - 1) / (len(layers) - 1) + 1e-5
        layers[index].self_attn = LightningAttention(
            config.hidden_size, heads=4, head_dim=8, depth=depth, groups=2, eps=config.rms_norm_eps
        )
