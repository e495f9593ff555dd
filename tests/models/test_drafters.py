"""Layers for multi-token prediction: guesses as a decoder layer of transformers makes them, outputs as without."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.cases import tiny
from safetensors.torch import load_file, save_file
from support.checkpoints.quantized_folder import compressed_tensors, write_quantized
from torch import Tensor

from pagoda import LLM, SamplingParams
from pagoda.backends.reference.drafting import DraftRunner
from pagoda.common.engine.steps.contract import StepPlan
from pagoda.common.errors import ConfigError

PROMPTS = [[5, 9, 13, 2, 7, 7, 31, 40], [1, 2, 3], [44, 44]]
ONE: dict[str, Any] = {"num_nextn_predict_layers": 1}
HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CASES = {
    "dense": tiny.Tiny("deepseek3-mtp", "DeepseekV3ForCausalLM", ONE, tiny.LATENT),
    "experts": tiny.Tiny("deepseek3-mtp-experts", "DeepseekV3ForCausalLM", {**tiny.ROUTED, **ONE}, tiny.LATENT),
    "grouped heads": tiny.Tiny(
        "glm4-moe-mtp", "Glm4MoeForCausalLM", {**tiny.ROUTED, "attention_bias": True, "head_dim": 16, **ONE}
    ),
    "indexer": tiny.Tiny("deepseek32-mtp", "DeepseekV32ForCausalLM", ONE, tiny.SPARSE_LATENT),
    "first of two": tiny.Tiny(
        "deepseek3-mtp-two", "DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 2}, tiny.LATENT
    ),
    "hidden state first": next(case for case in tiny.TINY if case.name == "mimo"),
    "beside recurrent layers": tiny.Tiny(
        "qwen3.5-mtp", "Qwen3_5ForCausalLM", {**HYBRID, "mtp_num_hidden_layers": 1}, tiny.DENSE_NEXT
    ),
    "beside recurrent layers, experts": tiny.Tiny("qwen3-next-mtp", "Qwen3NextForCausalLM", HYBRID, tiny.NEXT),
}


@dataclass(frozen=True)
class Form:
    """How a checkpoint stores the layer, and what it reads."""

    layer: str  # prefix of the layer's tensors; {} is the number of the model's layers
    inputs: str  # prefix of those beside it
    names: tuple[str, str, str, str]  # of the two norms before, the projection and the norm after
    hidden_first: bool = False
    blank_first: bool = True  # the embedding at position 0 is 0
    chains_normed: bool = False
    unit_offset: bool = False  # norms multiply by 1 + weight


NUMBERED = Form("model.layers.{}.", "model.layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
LISTED = Form(
    "model.mtp_layers.0.",
    "model.mtp_layers.0.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    hidden_first=True,
    chains_normed=True,
)
MODULE = Form(
    "mtp.layers.0.",
    "mtp.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    blank_first=False,
    chains_normed=True,
    unit_offset=True,
)
FORMS = {"MiMoForCausalLM": LISTED, "Qwen3NextForCausalLM": MODULE, "Qwen3_5ForCausalLM": MODULE}
"""Architecture -> form, NUMBERED of all others."""


class Oracle:
    """A model of transformers with one more layer, which guesses."""

    def __init__(self, folder: Path, inputs: tuple[Tensor, ...], form: Form) -> None:
        config = json.loads((folder / "config.json").read_text())
        if config["architectures"] == ["MiMoForCausalLM"]:
            config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            (folder / "config.json").write_text(json.dumps(config))
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.inputs, self.form = inputs, form
        *self.before, self.layer = self.model.model.layers
        self.model.model.layers = torch.nn.ModuleList(self.before)
        self.model.config.num_hidden_layers -= 1

    @torch.inference_mode()
    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """Return what follows `tokens`, of which the model has computed all but the last."""
        embed_norm, hidden_norm, project, final = self.inputs
        inner, guesses = self.model.model, []
        hidden = inner(torch.tensor([tokens[:-1]]), use_cache=False).last_hidden_state
        for _ in range(count):
            embeds = inner.embed_tokens(torch.tensor([[*tokens[1:], *guesses]])).clone()
            if self.form.blank_first:
                embeds[:, 0] = 0
            parts = [self._norm(embeds, embed_norm), self._norm(hidden, hidden_norm)]
            x = self._run_layer(torch.cat(parts[::-1] if self.form.hidden_first else parts, -1) @ project.T)
            normed = self._norm(x, final)
            guesses.append(int(self.model.lm_head(normed[0, -1]).argmax()))
            hidden = torch.cat([hidden, (normed if self.form.chains_normed else x)[:, -1:]], 1)
        return guesses

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return normed * (1 + weight if self.form.unit_offset else weight)

    def _run_layer(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), float("-inf")).triu(1)
        rotations = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
        return out[0] if isinstance(out, tuple) else out


def add_layer(folder: Path, oracle: Path, form: Form) -> tuple[Tensor, ...]:
    """Add a random layer to a checkpoint, and one more to a copy of it for the oracle; the layer's four inputs."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    config = json.loads((folder / "config.json").read_text())
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    kinds = config.get("layer_types", [])
    like = kinds.index("full_attention") if "linear_attention" in kinds else last
    shapes = [
        (name.split(".", 3)[3], tuple(value.shape))
        for name, value in tensors.items()
        if name.startswith(f"model.layers.{like}.")
    ]
    own_shapes = [(f"{name}.weight", (width,) if "norm" in name else (width, 2 * width)) for name in form.names]
    layer, own = (
        {name: torch.randn(shape, generator=generator) * 0.3 + (1 if "norm" in name else 0) for name, shape in every}
        for every in (shapes, own_shapes)
    )
    layer_prefix, own_prefix = (prefix.format(last + 1) for prefix in (form.layer, form.inputs))
    added = {layer_prefix + name: value for name, value in layer.items()}
    added |= {own_prefix + name: value for name, value in own.items()}
    if form is NUMBERED:
        added[f"{own_prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        added[f"{own_prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if config.get("num_nextn_predict_layers") == 2:
        zeros = {name: torch.zeros_like(value) for name, value in {**layer, **own}.items()}
        added |= {f"model.layers.{last + 2}.{name}": value for name, value in zeros.items()}
    save_file({**tensors, **added}, folder / "model.safetensors")
    oracle.mkdir()
    more = {f"model.layers.{last + 1}.{name}": value for name, value in layer.items()}
    save_file({**tensors, **more}, oracle / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] += 1
    if config.get("first_k_dense_replace") == last + 1:
        config["first_k_dense_replace"] += 1
    for types in ("layer_types", "mlp_layer_types", "indexer_types"):
        if types in config:
            config[types].append(config[types][like])
    (oracle / "config.json").write_text(json.dumps(config))
    return tuple(own[f"{name}.weight"] for name in form.names)


def outputs(folder: Path, **settings: Any) -> list[list[int]]:
    llm = LLM(
        model=str(folder),
        backend="reference",
        dtype="float32",
        max_model_len=48,
        max_num_seqs=3,
        kv_cache_memory_bytes=1 << 22,
        skip_tokenizer_init=True,
        **settings,
    )
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("name", CASES)
def test_a_layer_after_the_last_one_guesses_as_transformers_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    form = FORMS.get(CASES[name].architecture, NUMBERED)
    CASES[name].save(tmp_path / "model")
    plain = outputs(tmp_path / "model")
    inputs = add_layer(tmp_path / "model", tmp_path / "oracle", form)
    records: list[tuple[list[int], list[int]]] = []
    guess = DraftRunner.guess

    def record(self: DraftRunner, plan: StepPlan, token_ids: Any, features: Tensor, history: Any) -> Any:
        guesses = guess(self, plan, token_ids, features, history)
        if guesses is not None:
            accepted = np.maximum((token_ids.reshape(plan.num_seqs, -1) >= 0).sum(1) - 1, 0)
            drafts = 0 if plan.num_drafts is None else plan.num_drafts
            known = plan.context + np.diff(plan.query_start) - drafts + accepted + 1
            for row, end, guessed in zip(plan.rows.tolist(), known.tolist(), guesses.tolist()):
                records.append((history[row, :end].tolist(), [token for token in guessed if token >= 0]))
        return guesses

    monkeypatch.setattr(DraftRunner, "guess", record)
    assert outputs(tmp_path / "model", speculative_config={"method": "mtp", "num_speculative_tokens": 3}) == plain
    oracle = Oracle(tmp_path / "oracle", inputs, form)
    assert len(records) > 5
    for tokens, guessed in records:
        assert oracle.guesses(tokens, len(guessed)) == guessed


def test_models_without_such_layers_are_refused(tmp_path: Path):
    tiny.Tiny("llama-mtp", "LlamaForCausalLM").save(tmp_path / "llama")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no supported layers"):
        outputs(tmp_path / "llama", speculative_config={"method": "mtp"})
    CASES["dense"].save(tmp_path / "lacks")
    with pytest.raises(ConfigError, match="the checkpoint has no tensors"):
        outputs(tmp_path / "lacks", speculative_config={"method": "mtp"})


def write_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_modules_of_another_form_are_refused(tmp_path: Path):
    """Several layers, an embedding of its own, and a model that has no layer of the module's kind."""
    case = CASES["beside recurrent layers"]
    for changes, message in (
        ({"mtp_num_hidden_layers": 2}, "the module mtp has 2 layers, and one is supported"),
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0: the checkpoint has no such layers"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true, which is unsupported"),
        ({"layer_types": ["linear_attention"] * 3}, "the model has no layer with full attention"),
    ):
        case.save(tmp_path)
        write_config(tmp_path, **changes)
        with pytest.raises(ConfigError, match=message):
            outputs(tmp_path, speculative_config={"method": "mtp"}, load_format="dummy")


def test_the_module_of_a_multimodal_checkpoint(tmp_path: Path):
    """Its name has no prefix there, those of the text model have."""
    CASES["beside recurrent layers"].save(tmp_path / "model")
    add_layer(tmp_path / "model", tmp_path / "oracle", MODULE)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    assert renamed.keys() > {"model.language_model.embed_tokens.weight", "mtp.fc.weight"}
    save_file(renamed, tmp_path / "model" / "model.safetensors")
    text = json.loads((tmp_path / "model" / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "model" / "config.json").write_text(json.dumps(whole))
    settings = {"method": "mtp", "num_speculative_tokens": 2}
    assert outputs(tmp_path / "model", speculative_config=settings) == outputs(tmp_path / "model")


def test_a_quantised_module(tmp_path: Path):
    """The model's layer 0, by whose name the rules know the module's, is not quantised."""
    CASES["beside recurrent layers"].save(tmp_path / "dense")
    add_layer(tmp_path / "dense", tmp_path / "oracle", MODULE)
    config = compressed_tensors(ignore=["lm_head", "model.layers.0"])
    folder, twin = write_quantized(tmp_path / "dense", tmp_path / "model", config, kept=r"lm_head|model\.layers\.0\.")
    assert "mtp.layers.0.mlp.up_proj.weight_scale" in load_file(folder / "model.safetensors")
    settings = {"method": "mtp", "num_speculative_tokens": 2}
    assert outputs(folder, speculative_config=settings) == outputs(twin)
