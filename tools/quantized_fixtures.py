"""Write tests/data/quantized: a tiny model quantised by the library of each scheme, and the logits of its own values.

    python tools/quantized_fixtures.py [NAME ...]

Needs the libraries of the schemes, none of which pagoda depends on, in an environment of its own: transformers, and for
each name those that its file states under `libraries` (gptqmodel and autoawq also work from their unpacked sources on
PYTHONPATH). A fixture is NAME.safetensors, the tensors of the quantised layers as the library stores them, and
NAME.json: the quantization_config, the logits of transformers' model with the values that the library dequantises them
to, and the versions. `base.*` are the config and the tensors that all fixtures share. No GPU is needed.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FOLDER: Final = Path(__file__).resolve().parents[1] / "tests" / "data" / "quantized"
TOKENS: Final = [1, 5, 9, 13, 2, 30, 17, 8]
CONFIG: Final = {
    **{"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2},
    **{"tie_word_embeddings": False, "pad_token_id": None},
}

Layer = tuple[dict[str, Tensor], Tensor]
"""The stored tensors of a layer, by the last part of their names, and its values."""

Write = Callable[[str, Tensor], Layer]
"""(module, weight [O, I] float32) -> the layer."""


def model() -> transformers.LlamaForCausalLM:
    """Return the random model, in values of bfloat16."""
    torch.manual_seed(19)
    config = transformers.LlamaConfig(**CONFIG)
    built = transformers.LlamaForCausalLM(config).float().eval()
    for parameter in built.parameters():
        spread = 0.2 if parameter.ndim == 2 else 0.1
        parameter.data = (parameter.ndim == 1) + spread * torch.randn(parameter.shape)
        parameter.data = parameter.data.bfloat16().float()
    return built


def layers(built: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that are quantised."""
    for name, module in built.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            yield name, module


def write_base() -> None:
    """Write what all fixtures share."""
    built = model()
    quantised = {f"{name}.weight" for name, _ in layers(built)}
    shared = {name: value.bfloat16() for name, value in built.state_dict().items() if name not in quantised}
    save_file(shared, FOLDER / "base.safetensors")
    config = {**built.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (FOLDER / "base.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def write(name: str) -> None:
    """Write one fixture."""
    libraries, make = FIXTURES[name]
    config, quantise = make()
    built, stored = MODELS.get(name, model)(), dict[str, Tensor]()
    for module, linear in layers(built):
        tensors, values = quantise(module, linear.weight.data.clone())
        assert values.shape == linear.weight.shape
        error = (values.float() - linear.weight).norm() / linear.weight.norm()
        assert error < 0.6, f"{module}: relative error {error}"
        linear.weight.data = values.float()
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    with torch.inference_mode():
        logits = built(torch.tensor([TOKENS])).logits[0]
    versions = {each: importlib.metadata.version(each) for each in ("torch", "transformers", *libraries)}
    save_file(stored, FOLDER / f"{name}.safetensors")
    content = {"libraries": versions, "quantization_config": config, "tokens": TOKENS, "logits": rounded(logits)}
    (FOLDER / f"{name}.json").write_text(json.dumps(content) + "\n")


def rounded(logits: Tensor) -> list[list[float]]:
    """Return the logits as JSON, to seven digits."""
    return [[float(f"{value:.7g}") for value in row] for row in logits.tolist()]


def compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None
) -> tuple[dict[str, Any], Write]:
    """compressed-tensors in one of its formats."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    activations = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations, format=form)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=form, quantization_status="compressed"
    )
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantise(module: str, weight: Tensor) -> Layer:
        outputs, columns = weight.shape
        match args.strategy:
            case "tensor":
                blocks = weight.reshape(1, -1)
            case "channel":
                blocks = weight.unsqueeze(1)
            case "block":
                rows, size = args.block_structure
                blocks = weight.reshape(outputs // rows, rows, columns // size, size).transpose(1, 2).flatten(2)
            case _:
                blocks = weight.reshape(outputs, columns // args.group_size, args.group_size)
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, whole)
        state = {"weight": weight.clone(), "weight_scale": scale.float(), "weight_zero_point": zero}
        if whole is not None:
            state["weight_global_scale"] = whole
        if activations is not None and activations.dynamic == "local":
            state["input_global_scale"] = torch.tensor([300.0])
        if activations is not None and activations.dynamic is False:
            state["input_scale"] = torch.tensor([0.03])
        stored = compressor.compress(dict(state), scheme)
        if args.symmetric:
            stored.pop("weight_zero_point", None)
        if whole is not None:  # the library's product, in float32
            numbers = unpack_fp4_from_uint8(stored["weight_packed"], outputs, columns, dtype=torch.float32)
            scale = stored["weight_scale"].float()
            return stored, dequantize(numbers, scale, args=args, global_scale=whole, dtype=torch.float32)
        return stored, compressor.decompress(dict(stored), scheme)["weight"]

    return config.model_dump(mode="json"), quantise


ROTATIONS: Final[dict[str, Any]] = {
    "R2": {
        "type": "hadamard",
        "head_dim": CONFIG["head_dim"],
        "precision": "torch.float64",
        "apply": [
            {"targets": ["re:.*v_proj$"], "location": "weight_output"},
            {"targets": ["re:.*o_proj$"], "location": "weight_input", "inverse": True},
        ],
    }
}
"""SpinQuant's rotation of values by heads."""


def rotated_model() -> transformers.LlamaForCausalLM:
    """Return the random model with its values rotated, which compressed-tensors fuses into the weights."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    built = model()
    apply_transform_config(built, TransformConfig(config_groups=ROTATIONS))
    assert not any("R2" in name for name, _ in built.named_modules()), "nothing is left to be computed"
    tokens = torch.tensor([TOKENS])
    with torch.inference_mode():
        torch.testing.assert_close(built(tokens).logits, model()(tokens).logits, atol=1e-4, rtol=1e-4)
    return built


def compressed_rotated() -> tuple[dict[str, Any], Write]:
    """compressed-tensors' integers of a rotated model, with the transform_config that it writes."""
    from compressed_tensors.transform import TransformConfig

    config, quantise = compressed("pack-quantized", INT4)
    rotations = TransformConfig(config_groups=ROTATIONS).model_dump(mode="json")
    return {**config, "transform_config": rotations}, quantise


def compressed_sparse() -> tuple[dict[str, Any], Write]:
    """compressed-tensors' FP8 of two values in four, which the library wrote before 0.14: run this with 0.12.2."""
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import (
        Sparse24BitMaskTensor,
        get_24_bytemasks,
    )

    sparsity = {"format": "sparse-24-bitmask", "global_sparsity": 0.5, "sparsity_structure": "2:4"}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {
        **{"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None},
        "sparsity_config": {**sparsity, "ignore": ["lm_head"], "targets": ["Linear"]},
    }

    def quantise(module: str, weight: Tensor) -> Layer:
        pruned = weight * get_24_bytemasks(weight)
        scales = pruned.abs().amax(1, keepdim=True) / 448
        numbers = (pruned / scales).to(torch.float8_e4m3fn)
        matrix = Sparse24BitMaskTensor.from_dense(numbers)
        stored = {name.removeprefix(f"{module}."): part for name, part in matrix.dict(name_prefix=module).items()}
        return {**stored, "weight_scale": scales}, matrix.decompress().float() * scales

    return config, quantise


def mxfp8() -> tuple[dict[str, Any], Write]:
    """The layout of MiniMax-M3: compressed-tensors' numbers and exponents under other names."""
    config = {
        **{"quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"},
        **{"weight_block_size": [1, 32], "ignored_layers": ["lm_head", "model.embed_tokens"]},
    }
    _, plain = compressed(
        "mxfp8-quantized", {**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    )

    def quantise(module: str, weight: Tensor) -> Layer:
        stored, values = plain(module, weight)
        return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}, values

    return config, quantise


def compressed_reordered() -> tuple[dict[str, Any], Write]:
    """compressed-tensors with actorder, whose columns the library before 0.20 took in the order of their groups."""
    config, plain = compressed("pack-quantized", {**INT4, "symmetric": True})
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def quantise(module: str, weight: Tensor) -> Layer:
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

        order = order_of(module, weight.shape[1])
        stored, values = plain(module, weight[:, order])
        back = torch.argsort(order)
        numbers = unpack_from_int32(stored["weight_packed"], 4, weight.shape)
        stored["weight_packed"] = pack_to_int32(numbers[:, back].contiguous(), 4)
        stored["weight_g_idx"] = (back // GROUP).to(torch.int32)
        return stored, values[:, back]

    return config, quantise


def order_of(module: str, inputs: int) -> Tensor:
    """Return an order of a layer's inputs: that of their importance, hence the same in layers with the same inputs."""
    readers = {"o_proj": 1, "gate_proj": 2, "up_proj": 2, "down_proj": 3}
    generator = torch.Generator().manual_seed(readers.get(module.rpartition(".")[2], 0))
    return torch.randperm(inputs, generator=generator)


GROUP: Final = 32
INT4: Final = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8: Final = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8: Final = {"num_bits": 8, "type": "float", "strategy": "channel"}
BY_TOKEN: Final = {"num_bits": 8, "strategy": "token", "dynamic": True}
FLOAT4: Final = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def gptq(bits: int, *, ordered: bool = False, sym: bool = True, form: str = "gptq") -> tuple[dict[str, Any], Write]:
    """gptqmodel's linear layer, packed from rounded weights."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    config = {
        **{"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": sym},
        **{"lm_head": False, "checkpoint_format": form, "pack_dtype": "int32", "true_sequential": True},
        "meta": {"quantizer": ["gptqmodel"], "damp_percent": 0.05},
    }
    settings = QuantizeConfig(bits=bits, group_size=GROUP, desc_act=ordered, sym=sym)

    def quantise(module: str, weight: Tensor) -> Layer:
        outputs, inputs = weight.shape
        order = torch.arange(inputs)
        if ordered:
            order = order_of(module, inputs)
        groups = torch.empty(inputs, dtype=torch.int32)
        groups[order] = (torch.arange(inputs) // GROUP).int()
        grouped = weight[:, order].reshape(outputs, -1, GROUP)
        largest = 2**bits - 1
        if sym:
            scales = (2 * grouped.abs().amax(-1) / largest).half().float()
            zeros = torch.full_like(scales, 2 ** (bits - 1))
        else:
            low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
            scales = ((high - low) / largest).half().float()
            zeros = (-low / scales).round()
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = weight
        packed = TorchLinear(
            bits=bits, group_size=GROUP, sym=sym, desc_act=ordered, in_features=inputs, out_features=outputs, bias=False
        )
        packed.pack_original(linear, scales, zeros, groups)
        packed.post_init()
        dequantised = packed.dequantize_weight().float().T
        wide = packed.scales.float()
        whole = (dequantised.T / wide[groups.long()]).round()  # the library's product is rounded to 16 bits
        if form == FORMAT.GPTQ.value:
            convert_gptq_v2_to_v1_format_module(packed, settings)
        tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        return tensors, (whole * wide[groups.long()]).T

    return config, quantise


def awq(version: str) -> tuple[dict[str, Any], Write]:
    """autoawq's linear layer."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.utils.packing_utils import dequantize_gemm

    config = {
        **{"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": version},
        "modules_to_not_convert": None,
    }

    def quantise(module: str, weight: Tensor) -> Layer:
        outputs, inputs = weight.shape
        grouped = weight.reshape(outputs, -1, GROUP)
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        rounded_weight = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, 15) - zeros[..., None]
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = (rounded_weight * scales[..., None]).reshape(outputs, inputs)
        gemm = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
        values = dequantize_gemm(gemm.qweight, gemm.qzeros, gemm.scales.float(), 4, GROUP).T
        kind = gemm
        if version == "gemv":
            kind = WQLinear_GEMV.from_linear(linear, 4, GROUP, scales=scales, zeros=zeros)
        return {name: getattr(kind, name) for name in ("qweight", "qzeros", "scales")}, values

    return config, quantise


def bitsandbytes(kind: str, *, nested: bool = False) -> tuple[dict[str, Any], Write]:
    """bitsandbytes' linear layers, as their state dicts have them."""
    from bitsandbytes import functional
    from transformers import BitsAndBytesConfig

    four = kind != "int8"
    config = BitsAndBytesConfig(
        load_in_4bit=four,
        load_in_8bit=not four,
        **({"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested} if four else {}),
    ).to_dict()

    def quantise(module: str, weight: Tensor) -> Layer:
        if not four:
            numbers, scales, _ = functional.int8_vectorwise_quant(weight.half())
            stored = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            return stored, functional.int8_vectorwise_dequant(numbers, scales)
        codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
        parts = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {"weight": codes, **parts}, functional.dequantize_4bit(codes, state)

    return config, quantise


def bitnet(linear_class: str) -> tuple[dict[str, Any], Write]:
    """transformers' packed weights of -1, 0 and 1, with the scale that its linear classes divide or multiply by."""
    from transformers import BitNetQuantConfig
    from transformers.integrations import bitnet as layout

    def quantise(module: str, weight: Tensor) -> Layer:
        scale = weight.abs().mean()
        packed = layout.pack_weights((weight / scale).round().clamp(-1, 1))
        numbers = torch.cat([(packed >> 2 * block & 3).float() - 1 for block in range(4)])
        factor = (1 / scale if linear_class == "bitlinear" else scale).reshape(1)
        values = numbers / factor if linear_class == "bitlinear" else numbers * factor
        return {"weight": packed, "weight_scale": factor}, values

    return BitNetQuantConfig(linear_class=linear_class).to_dict(), quantise


def hqq(bits: int) -> tuple[dict[str, Any], Write]:
    """HQQ's linear layers, as their state dicts have them."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    settings = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=1)
    config = {"quant_method": "hqq", "quant_config": settings, "skip_modules": ["lm_head"]}

    def quantise(module: str, weight: Tensor) -> Layer:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        packed = HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
        return packed.state_dict(), packed.dequantize()

    return config, quantise


def fbgemm() -> tuple[dict[str, Any], Write]:
    """The layout of transformers' FbgemmFp8Linear, whose kernels need a GPU: written and multiplied here."""
    from transformers import FbgemmFp8Config

    def quantise(module: str, weight: Tensor) -> Layer:
        scales = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scales).to(torch.float8_e4m3fn)
        stored = {"weight": numbers, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
        return stored, numbers.float() * scales

    return FbgemmFp8Config(modules_to_not_convert=["lm_head"]).to_dict(), quantise


def exported(folder: str, values: dict[str, Tensor]) -> tuple[dict[str, Any], Write]:
    """A model that a library has exported as a whole, and the values of its layers."""
    tensors = load_file(f"{folder}/model.safetensors")
    config = json.loads(Path(folder, "config.json").read_text())["quantization_config"]

    def quantise(module: str, weight: Tensor) -> Layer:
        stored = {name[len(module) + 1 :]: each for name, each in tensors.items() if name.startswith(f"{module}.")}
        return stored, values[module]

    return config, quantise


def modelopt(*algorithms: str) -> tuple[dict[str, Any], Write]:
    """Model Optimizer's export; of two algorithms the second is that of the feed-forward block."""
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    built = model()
    built.config.architectures = ["LlamaForCausalLM"]
    settings = copy.deepcopy(getattr(quantization, algorithms[0]))
    for other in algorithms[1:]:
        for entry in copy.deepcopy(getattr(quantization, other))["quant_cfg"]:
            name = entry.get("quantizer_name", "")
            if name in ("*weight_quantizer", "*input_quantizer"):
                settings["quant_cfg"].append({**entry, "quantizer_name": f"*mlp{name}"})
    built = quantization.quantize(built, settings, lambda each: each(torch.tensor([TOKENS])))
    names, values = [name for name, _ in layers(built)], dict[str, Tensor]()
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(built, export_dir=folder)
        stored = load_file(f"{folder}/model.safetensors")
        for name in names:
            data, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
            if data.dtype == torch.uint8:
                shape, double = torch.Size((data.shape[0], data.shape[1] * 2)), stored[f"{name}.weight_scale_2"]
                packed = NVFP4QTensor(shape, torch.float32, data)
                values[name] = packed.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
            else:
                scale = scale[:, None] if scale.ndim else scale
                whole = FP8QTensor(data.shape, torch.float32, data)
                values[name] = whole.dequantize(scale=scale, block_sizes={})
        return exported(folder, values)


def quark(weight: str, inputs: str | None = None) -> tuple[dict[str, Any], Write]:
    """Quark's export."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as settings

    grouped = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
    specs = {
        "fp8": lambda: settings.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "int8": lambda: settings.Int8PerChannelSpec(symmetric=True, ch_axis=0, **grouped),
        "int4": lambda: settings.Int4PerGroupSpec(symmetric=True, ch_axis=-1, group_size=GROUP, **grouped),
        "uint4": lambda: settings.Uint4PerGroupSpec(symmetric=False, ch_axis=-1, group_size=GROUP, **grouped),
        "mxfp4": lambda: settings.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    built = model()
    built.config.architectures = ["LlamaForCausalLM"]
    activations = None if inputs is None else specs[inputs]().to_quantization_spec()
    layer = settings.QLayerConfig(weight=specs[weight]().to_quantization_spec(), input_tensors=activations)
    config = settings.QConfig(global_quant_config=layer, exclude=["lm_head"])
    built = ModelQuantizer(config).quantize_model(built, [torch.tensor([TOKENS])])
    values = {name: linear.get_quant_weight(linear.weight).detach().clone() for name, linear in layers(built)}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        export_safetensors(ModelQuantizer.freeze(built), folder)
        return exported(folder, values)


def torchao(kind: str) -> tuple[dict[str, Any], Write]:
    """torchao's tensors, taken apart as transformers saves them."""
    from torchao import quantization
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers import TorchAoConfig

    settings = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "fp8": quantization.Float8WeightOnlyConfig,
        "intx4": lambda: quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(GROUP)),
    }[kind]()

    def quantise(module: str, weight: Tensor) -> Layer:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        quantization.quantize_(linear, settings)
        stored, _ = flatten_tensor_state_dict({"layer.weight": linear.weight.data})
        return {name.removeprefix("layer."): part for name, part in stored.items()}, linear.weight.dequantize()

    return TorchAoConfig(settings).to_dict(), quantise


def torchao_int4() -> tuple[dict[str, Any], Write]:
    """The layout of torchao's Int4Tensor, which it makes on GPUs only: numbers * scale + zero point, written here."""
    from torchao import quantization
    from transformers import TorchAoConfig

    def quantise(module: str, weight: Tensor) -> Layer:
        grouped = weight.reshape(len(weight), -1, GROUP)
        low, high = grouped.amin(-1), grouped.amax(-1)
        scales = (high - low) / 15
        zeros = low + 8 * scales
        numbers = ((grouped - low[..., None]) / scales[..., None]).round().clamp(0, 15) - 8
        values = (numbers * scales[..., None] + zeros[..., None]).reshape(weight.shape)
        flat = numbers.reshape(weight.shape).to(torch.int8)
        packed = (flat[:, 0::2] & 15) | (flat[:, 1::2] << 4)
        return {"_weight_qdata": packed, "_weight_scale": scales.T, "_weight_zero_point": zeros.T}, values

    return TorchAoConfig(quantization.Int4WeightOnlyConfig(group_size=GROUP)).to_dict(), quantise


def auto_round(form: str) -> tuple[dict[str, Any], Write]:
    """AutoRound's linear layers, packed from rounded weights."""
    from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing

    sym = "awq" not in form
    config = {
        **{"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": sym, "data_type": "int"},
        **{"packing_format": form, "autoround_version": "0.16.1", "iters": 200, "low_gpu_mem_usage": True},
        "block_name_to_quantize": "model.layers",
    }
    made = gptq(4)[1] if sym else awq("gemm")[1]

    def quantise(module: str, weight: Tensor) -> Layer:
        _, values = made(module, weight)  # another library's values of the same scheme
        if not sym:
            return made(module, weight)
        outputs, inputs = weight.shape
        kind = dynamic_import_quant_linear_for_packing(form, 4, GROUP, sym)
        linear = nn.Linear(inputs, outputs, bias=False)
        linear.weight.data = weight
        scales = (2 * weight.reshape(outputs, -1, GROUP).abs().amax(-1) / 15).half().float()
        packed = kind(4, GROUP, inputs, outputs, bias=False, weight_dtype=torch.float16)
        packed.device = "cpu"
        packed.pack(linear, scales, torch.full_like(scales, 8), None, device="cpu")
        return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}, values

    return config, quantise


CT: Final = ("compressed-tensors",)
Make = Callable[[], tuple[dict[str, Any], Write]]
FIXTURES: Final[dict[str, tuple[tuple[str, ...], Make]]] = {
    "ct-int8-token": (CT, lambda: compressed("int-quantized", INT8, {**BY_TOKEN, "type": "int"})),
    "ct-int8-asymmetric": (
        CT,
        lambda: compressed("int-quantized", {**INT8, "symmetric": False}, {**BY_TOKEN, "type": "int"}),
    ),
    "ct-fp8-token": (CT, lambda: compressed("float-quantized", FLOAT8, {**BY_TOKEN, "type": "float"})),
    "ct-fp8-static": (
        CT,
        lambda: compressed(
            "float-quantized",
            {**FLOAT8, "strategy": "tensor"},
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
    ),
    "ct-fp8-block": (
        CT,
        lambda: compressed(
            "float-quantized",
            {**FLOAT8, "strategy": "block", "block_structure": [16, 32]},
            {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
        ),
    ),
    "ct-fp8-group": (
        CT,
        lambda: compressed("naive-quantized", {**FLOAT8, "strategy": "group", "group_size": GROUP}),
    ),
    "ct-mxfp8": (
        CT,
        lambda: compressed(
            "mxfp8-quantized", {**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
        ),
    ),
    "ct-rotated": (CT, compressed_rotated),
    "ct-sparse-24": (CT, compressed_sparse),
    "mxfp8": (CT, mxfp8),
    "ct-w4a16": (CT, lambda: compressed("pack-quantized", INT4)),
    "ct-w4a16-asymmetric": (CT, lambda: compressed("pack-quantized", {**INT4, "symmetric": False})),
    "ct-w4a16-actorder": (CT, compressed_reordered),
    "ct-w4a16-channel": (
        CT,
        lambda: compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    ),
    "ct-w3a16": (CT, lambda: compressed("pack-quantized", {**INT4, "num_bits": 3})),
    "ct-w8a16": (CT, lambda: compressed("pack-quantized", {**INT4, "num_bits": 8, "symmetric": False})),
    "ct-nvfp4": (CT, lambda: compressed("nvfp4-pack-quantized", FLOAT4, {**FLOAT4, "dynamic": "local"})),
    "ct-mxfp4": (
        CT,
        lambda: compressed("mxfp4-pack-quantized", {**FLOAT4, "strategy": "group", "group_size": 32}),
    ),
    "gptq-2": (("gptqmodel",), lambda: gptq(2)),
    "gptq-3": (("gptqmodel",), lambda: gptq(3, sym=False)),
    "gptq-4": (("gptqmodel",), lambda: gptq(4)),
    "gptq-4-ordered": (("gptqmodel",), lambda: gptq(4, ordered=True, sym=False)),
    "gptq-4-v2": (("gptqmodel",), lambda: gptq(4, sym=False, form="gptq_v2")),
    "gptq-8-ordered": (("gptqmodel",), lambda: gptq(8, ordered=True)),
    "awq-gemm": (("autoawq",), lambda: awq("gemm")),
    "awq-gemv": (("autoawq",), lambda: awq("gemv")),
    "bitnet": ((), lambda: bitnet("bitlinear")),
    "bitnet-auto": ((), lambda: bitnet("autobitlinear")),
    "hqq-4": (("hqq",), lambda: hqq(4)),
    "hqq-3": (("hqq",), lambda: hqq(3)),
    "bnb-nf4": (("bitsandbytes",), lambda: bitsandbytes("nf4")),
    "bnb-fp4-nested": (("bitsandbytes",), lambda: bitsandbytes("fp4", nested=True)),
    "bnb-int8": (("bitsandbytes",), lambda: bitsandbytes("int8")),
    "fbgemm-fp8": ((), fbgemm),
    "modelopt-fp8": (("nvidia-modelopt",), lambda: modelopt("FP8_DEFAULT_CFG")),
    "modelopt-fp8-channel": (("nvidia-modelopt",), lambda: modelopt("FP8_PER_CHANNEL_PER_TOKEN_CFG")),
    "modelopt-nvfp4": (("nvidia-modelopt",), lambda: modelopt("NVFP4_DEFAULT_CFG")),
    "modelopt-mixed": (("nvidia-modelopt",), lambda: modelopt("FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG")),
    "quark-fp8": (("amd-quark",), lambda: quark("fp8", "fp8")),
    "quark-int8": (("amd-quark",), lambda: quark("int8")),
    "quark-int4": (("amd-quark",), lambda: quark("int4")),
    "quark-uint4": (("amd-quark",), lambda: quark("uint4")),
    "quark-mxfp4": (("amd-quark",), lambda: quark("mxfp4")),
    "torchao-int8": (("torchao",), lambda: torchao("int8")),
    "torchao-int8-dynamic": (("torchao",), lambda: torchao("int8-dynamic")),
    "torchao-fp8": (("torchao",), lambda: torchao("fp8")),
    "torchao-intx4": (("torchao",), lambda: torchao("intx4")),
    "torchao-int4": (("torchao",), torchao_int4),
    "auto-round-gptq": (("auto-round", "gptqmodel"), lambda: auto_round("auto_round:auto_gptq")),
    "auto-round-plain": (("auto-round", "gptqmodel"), lambda: auto_round("auto_round")),
}
"""Name -> libraries, and what makes the fixture."""

MODELS: Final[dict[str, Callable[[], transformers.LlamaForCausalLM]]] = {"ct-rotated": rotated_model}
"""Name -> the model that is quantised, if it is another than `model`'s."""


def main() -> None:
    """Write the fixtures that are named, or all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_base()
    for name in sys.argv[1:] or FIXTURES:
        write(name)
        size = sum(path.stat().st_size for path in FOLDER.glob(f"{name}.*"))
        print(f"{name}: {size} bytes")


if __name__ == "__main__":
    main()
