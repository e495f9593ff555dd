"""Open model files that are mutated at random: each must be read or refused by one line that names the file.

    python tools/fuzz_files.py [--format NAME] [--cases 100000] [--seed 0] [--only CASE] [--jobs 2]

A case is reproduced by its format, seed and number. Cases run in a child process for each of --jobs formats at a time,
with limits of processor time per case and of memory; it is replaced when it dies.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

SECONDS: Final = 5.0
"""Processor time of a case."""
MEMORY_BYTES: Final = 1 << 30
"""Memory of the child beyond what it has at the start."""
MAX_MESSAGE: Final = 4_000
"""Characters of an error."""

Files = dict[str, bytes]
"""Name in the model's folder -> content."""


class SlowError(BaseException):
    """A case used up its time. No `except Exception` catches it."""


@dataclass(frozen=True)
class Format:
    """A kind of file: its valid examples, how one is mutated, and what reads the folder of it."""

    examples: Callable[[], Sequence[Files]]
    mutate: Callable[[Random, Files], Files]
    read: Callable[[Path], object]
    names_file: bool = True  # whether errors name the file; those of tensors in requests name the field elsewhere
    modules: tuple[str, ...] = ()  # imported before the first case, whose time would not suffice


# Mutations.

_NASTY: Final[tuple[Any, ...]] = (
    *(0, 1, -1, 2, 3, 7, 255, 10**6, 10**9, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.0, -0.0, 0.5, -1.5, 1e-308, 1e308, math.nan, math.inf, -math.inf, True, False, None),
    *("", "x", "0", "-1", "auto", "None", "é\u0000\n", "\ud800", "x" * 5_000, "../../etc/passwd", "re:(a+)+$", "re:("),
    *([], {}, [[]], [0], [None], ["x"], {"x": 1}, [1, 2, 3], [-1] * 4, {"": {}}, [{}], [10**400]),
)
_INTEGERS: Final = (
    0,
    1,
    2,
    3,
    4,
    31,
    32,
    255,
    10**6,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**61,
    2**62,
    2**63,
    2**64 - 1,
)


def mutate_bytes(rng: Random, data: bytes, head: int | None = None) -> bytes:
    """Return the bytes with a few changes, most within the first `head`."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        end = min(len(changed), head) if head and rng.random() < 0.9 else len(changed)
        at = rng.randrange(end + 1)
        match rng.randrange(7):
            case 0 | 1 if at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 3:
                del changed[at : at + rng.choice((1, 4, 8, 100))]
            case 4:
                changed[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
            case 5:
                size = rng.choice((4, 8))
                changed[at : at + size] = (rng.choice(_INTEGERS) & (2 ** (8 * size) - 1)).to_bytes(size, "little")
            case _:
                del changed[at:]
    return bytes(changed)


def mutate_json(rng: Random, data: bytes) -> bytes:
    """Return JSON with values replaced, removed, moved or nested; now and then with broken bytes."""
    if rng.random() < 0.05:
        return mutate_bytes(rng, data)
    try:
        return _mutate_document(rng, data)
    except RecursionError:  # nested more than once
        return data[:-1] + b',"x":' + b"[" * 5_000


def _mutate_document(rng: Random, data: bytes) -> bytes:
    document = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            break
        holder, key = rng.choice(places)
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                holder[key] = copy.deepcopy(rng.choice(_NASTY))
            case 5:
                del holder[key]
            case 6:
                other, name = rng.choice(places)
                holder[key] = copy.deepcopy(other[name])
            case 7:
                holder[key] = _scaled(rng, holder[key])
            case 8 if isinstance(holder, dict):
                holder[rng.choice((key + "x", "", "num_experts", "rope_scaling", "layer_types"))] = holder.pop(key)
            case _:
                holder[key] = _nested(rng, holder[key])
    return json.dumps(document).encode()


def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield each container and key of a document."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items[:200]:
        yield value, key
        yield from _places(item)


def _scaled(rng: Random, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return [value] * rng.choice((2, 40)) if not isinstance(value, list) else value * rng.choice((0, 2, 7))
    larger = value * 1.5 if abs(value) < 1e300 else 1.5
    return rng.choice((value * 2, value + 1, value - 1, -value, value * 10**6, larger, str(value), [value]))


def _nested(rng: Random, value: Any) -> Any:
    for _ in range(rng.choice((1, 2, 50, 600))):
        value = [value] if rng.random() < 0.5 else {"x": value}
    return value


def mutate_one(name: str, change: Callable[[Random, bytes], bytes]) -> Callable[[Random, Files], Files]:
    """Return what changes one file of an example."""
    return lambda rng, files: {**files, name: change(rng, files[name])}


# Models in folders: config.json and what lies beside it.


def _model_folder() -> Files:
    from support.checkpoints.tiny_folder import write_model

    return _written(write_model)


def _written(write: Callable[[Path], object]) -> Files:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write(folder)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _config_examples() -> list[Files]:
    from support.servers.hub_configs import GENERATORS, POOLERS

    small = {"num_hidden_layers": 2}
    every = [{**config} for config in (*GENERATORS.values(), *POOLERS.values())]
    return [{"config.json": json.dumps(config).encode()} for config in every] + [
        {"config.json": json.dumps({**every[0], **small}).encode()}
    ]


def _quantization_examples() -> list[Files]:
    folder = ROOT / "tests" / "data" / "quantized"
    base = json.loads((folder / "base.json").read_text())
    sections = [
        json.loads(path.read_text())["quantization_config"]
        for path in sorted(folder.glob("*.json"))
        if path.stem != "base"
    ]
    return [{"config.json": json.dumps({**base, "quantization_config": each}).encode()} for each in sections]


def _mutate_quantization(rng: Random, files: Files) -> Files:
    config = json.loads(files["config.json"])
    try:
        config["quantization_config"] = json.loads(mutate_json(rng, json.dumps(config["quantization_config"]).encode()))
    except (RecursionError, ValueError):
        config["quantization_config"] = rng.choice(_NASTY)
    return {"config.json": json.dumps(config).encode()}


def _generation_examples() -> list[Files]:
    generation = {
        **{"bos_token_id": 1, "eos_token_id": [2, 256], "pad_token_id": 0, "do_sample": True, "temperature": 0.6},
        **{"top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 100},
    }
    return [{**_model_folder(), "generation_config.json": json.dumps(generation).encode()}]


def _module_examples() -> list[Files]:
    from support.servers.hub_configs import POOLERS

    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
        {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    config = next(config for config in POOLERS.values() if config["architectures"] == ["BertModel"])
    width = config["hidden_size"]
    texts: dict[str, Any] = {
        "config.json": config,
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": {
            **{"in_features": width, "out_features": 64, "bias": True},
            "activation_function": "torch.nn.modules.linear.Identity",
        },
        "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {"query": "query: "}},
    }
    return [{name: json.dumps(value).encode() for name, value in texts.items()}]


def _mutate_any(rng: Random, files: Files) -> Files:
    name = rng.choice(sorted(files))
    return {**files, name: mutate_json(rng, files[name])}


def _index_examples() -> list[Files]:
    files = _model_folder()
    weights = files.pop("model.safetensors")
    names = [name for name in _safetensors_header(weights) if name != "__metadata__"]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    index_text = json.dumps(index).encode()
    return [
        {**files, "model-00001-of-00001.safetensors": weights, "model.safetensors.index.json": index_text},
    ]


def resolve_folder(folder: Path, *, weights: bool = False) -> None:
    """Resolve the settings of a model's folder, as at the start of a server."""
    from pagoda.server.settings.flags import EngineArgs
    from pagoda.server.settings.resolve import resolve

    args = EngineArgs(str(folder), backend="reference", load_format="auto" if weights else "dummy")
    resolved = resolve(args.create_engine_config(), "server", weights=weights)
    _ = resolved.schemes, resolved.rows, resolved.generation
    if weights:
        for _ in resolved.checkpoint.tensors():
            pass


# Tokenizers.


def _tokenizer_examples() -> list[Files]:
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

    config: dict[str, Any] = {
        **{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "chat_template": "{{ messages }}"},
        "added_tokens_decoder": {"3": {"content": "<s>", "special": True, "lstrip": False}, "4": {"content": "</s>"}},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
    }
    vocab = {"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}
    kinds = (
        models.BPE(vocab, [("a", "b")], unk_token="a"),
        models.WordPiece(vocab, unk_token="a"),
        models.WordLevel(vocab, unk_token="a"),
        models.Unigram([("a", -1.0), ("b", -2.0), ("ab", -1.5)], 0),
    )
    examples: list[Files] = []
    for kind in kinds:
        backend = tokenizers.Tokenizer(kind)
        backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("x+"), "a")])
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel()]
        )
        backend.decoder = decoders.ByteLevel()
        backend.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        backend.add_special_tokens(["<s>"])
        examples.append(
            {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
        )
    special = json.dumps({"unk_token": "a", "pad_token": {"content": "<s>"}}).encode()
    examples.append(
        {
            "vocab.json": json.dumps(vocab).encode(),
            "merges.txt": b"#version: 0.2\na b\n",
            "tokenizer_config.json": json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}).encode(),
            "special_tokens_map.json": special,
            "chat_template.json": json.dumps({"chat_template": "x"}).encode(),
        }
    )
    return examples


def _mutate_tokenizer(rng: Random, files: Files) -> Files:
    name = rng.choice(sorted(files))
    change = mutate_json if name.endswith(".json") else mutate_bytes
    return {**files, name: change(rng, files[name])}


def read_tokenizer(folder: Path) -> None:
    """Open a tokenizer, encode and decode a text, analyse its tokens."""
    from pagoda.common.text.tokenizer import load_tokenizer

    _use_tokenizer(load_tokenizer(folder))


def _use_tokenizer(tokenizer: Any) -> None:
    from pagoda.common.errors import RequestError

    try:
        ids = tokenizer.encode("ab a b<s>", True)
        tokenizer.decode(ids[:8])
    except RequestError:
        pass
    _ = tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids


# Containers of tensors.


def _safetensors_header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    return header


def _safetensors_examples() -> list[Files]:
    from pagoda.common.weights.safetensors import write_safetensors

    def write(folder: Path) -> None:
        folder.mkdir()
        arrays = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.int8), "c": np.ones((), np.float16)}
        write_safetensors(folder / "model.safetensors", {**arrays, "d": np.empty((0, 4), np.float32)})

    return [_written(write)]


def _mutate_safetensors(rng: Random, data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    match rng.randrange(4):
        case 0:
            return mutate_bytes(rng, data, 8 + size)
        case 1:
            return (rng.choice(_INTEGERS) & (2**64 - 1)).to_bytes(8, "little") + data[8:]
        case _:
            header = mutate_json(rng, data[8 : 8 + size])
            return len(header).to_bytes(8, "little") + header + data[8 + size :]


def read_safetensors(folder: Path) -> None:
    """Open a file and read each tensor."""
    from pagoda.common.weights.safetensors import SafetensorsFile

    file = SafetensorsFile(folder / "model.safetensors")
    for name in file.sizes:
        file.tensor(name)


def _torch_examples() -> list[Files]:
    import torch

    state = {"a": torch.ones(2, 3), "b": torch.arange(6.0).reshape(2, 3).T, "c": torch.zeros(4, dtype=torch.bfloat16)}
    parameter = {"w": torch.nn.Parameter(torch.ones(2)), "e": torch.zeros(0, 3)}
    examples: list[Files] = []
    for each in (state, parameter):
        buffer = io.BytesIO()
        torch.save(each, buffer)
        examples.append({"pytorch_model.bin": buffer.getvalue()})
    return examples


def _mutate_torch(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for entry in old.infolist():
            content, name = old.read(entry), entry.filename
            if name.endswith("data.pkl") and rng.random() < 0.8:
                content = mutate_bytes(rng, content)
            elif rng.random() < 0.1:
                content = rng.choice((b"", content[:3], content * 2, bytes(1 << 24)))
            if rng.random() < 0.05:
                name = rng.choice((name + "x", "data.pkl", "x/data.pkl", "../x"))
            kind = zipfile.ZIP_DEFLATED if rng.random() < 0.15 else zipfile.ZIP_STORED
            new.writestr(name, content, kind)
    whole = buffer.getvalue()
    return mutate_bytes(rng, whole) if rng.random() < 0.15 else whole


def read_torch(folder: Path) -> None:
    """Open a file of torch.save and read each tensor."""
    from pagoda.common.weights.torch_bin import TorchFile

    file = TorchFile(folder / "pytorch_model.bin")
    for name, size in file.sizes.items():
        if size < 1 << 28:
            file.tensor(name)


def _tensor_examples() -> list[Files]:
    import torch

    examples: list[Files] = []
    for tensor in (torch.ones(3, 4), torch.arange(6.0).reshape(2, 3).T.to(torch.bfloat16)):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        examples.append({"tensor.pt": buffer.getvalue()})
    return examples


def read_one_tensor(folder: Path) -> None:
    """Read the tensor of a request."""
    from pagoda.common.weights.torch_bin import read_tensor

    read_tensor((folder / "tensor.pt").read_bytes())


# GGUF.


def _gguf_examples() -> list[Files]:
    from support.checkpoints.byte_text import byte_tokenizer

    from pagoda.tests.common.weights.gguf.gguf_writing import convert

    vocab = sorted(byte_tokenizer().backend.get_vocab(), key=byte_tokenizer().backend.get_vocab().__getitem__)
    examples: list[Files] = []
    for model in ("gpt2", "llama"):

        def write(folder: Path, model: str = model) -> None:
            from support.checkpoints.tiny_folder import write_model

            write_model(folder)
            tokens = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": vocab}
            _convert_with(convert, folder, tokens)

        files = _written(write)
        examples.append({"model.gguf": files["model.gguf"]})
    examples.append({"model.gguf": _blocks_file()})
    return examples


def _convert_with(convert: Callable[..., object], folder: Path, tokens: Mapping[str, Any]) -> None:
    import gguf

    original = gguf.GGUFWriter.write_header_to_file

    def write_header(writer: Any, *args: Any, **kwargs: Any) -> None:
        writer.add_tokenizer_model(tokens["tokenizer.ggml.model"])
        writer.add_token_list(tokens["tokenizer.ggml.tokens"])
        writer.add_token_types([1] * len(tokens["tokenizer.ggml.tokens"]))
        writer.add_token_scores([0.0] * len(tokens["tokenizer.ggml.tokens"]))
        writer.add_token_merges(["a b"])
        writer.add_tokenizer_pre("default")
        writer.add_eos_token_id(256)
        writer.add_chat_template("{{ messages }}")
        original(writer, *args, **kwargs)

    with patch.object(gguf.GGUFWriter, "write_header_to_file", write_header):
        convert(folder, folder / "model.gguf", "llama")


def _blocks_file() -> bytes:
    """A file of tensors with blocks."""
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, kind in (("a", "Q8_0"), ("b", "Q4_K"), ("c", "Q4_0"), ("d", "F16")):
            quantized = gguf.GGMLQuantizationType[kind]
            values = np.linspace(-1, 1, 512, dtype=np.float32).reshape(2, 256)
            blocks, size = gguf.constants.GGML_QUANT_SIZES[quantized]
            if kind == "F16":
                writer.add_tensor(name, values.astype(np.float16))
            else:
                data = np.zeros((2, 256 // blocks * size), np.uint8)
                writer.add_tensor(name, data, raw_dtype=quantized)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _gguf_fields(data: bytes) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each number in the header of a valid file."""
    fields: list[tuple[int, int]] = [(4, 4), (8, 8), (16, 8)]
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    num_tensors, num_pairs = struct.unpack_from("<QQ", data, 8)
    at = 24

    def number(size: int) -> int:
        nonlocal at
        fields.append((at, size))
        value = int.from_bytes(data[at : at + size], "little")
        at += size
        return value

    def text() -> None:
        nonlocal at
        size = number(8)
        at += size

    def value(kind: int) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            item, count = number(4), number(8)
            if item == 8:
                for _ in range(count):
                    text()
            else:
                at += count * sizes[item]
        else:
            number(sizes[kind])

    for _ in range(num_pairs):
        text()
        value(number(4))
    for _ in range(num_tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return fields


def _mutate_gguf(rng: Random, data: bytes) -> bytes:
    fields = _known_fields(data)
    head = fields[-1][0] + 8
    if rng.random() < 0.3:
        return mutate_bytes(rng, data, head)
    changed = bytearray(data)
    # Half of the changes are to the tensors, whose numbers are the last ones.
    tail = fields[-200:]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, size = rng.choice(fields if rng.random() < 0.5 else tail)
        old = int.from_bytes(changed[at : at + size], "little")
        new = rng.choice((*_INTEGERS, old + 1, old - 1, old * 2, old // 2, rng.randrange(45)))
        changed[at : at + size] = (new & (2 ** (8 * size) - 1)).to_bytes(size, "little")
    return bytes(changed)


_FIELDS: Final[dict[bytes, list[tuple[int, int]]]] = {}


def _known_fields(data: bytes) -> list[tuple[int, int]]:
    if data not in _FIELDS:
        _FIELDS[data] = _gguf_fields(data)
    return _FIELDS[data]


def read_gguf_file(folder: Path) -> None:
    """Open a GGUF file: its tensors, its tokenizer, and the settings of its model."""
    from pagoda.common.errors import ModelError
    from pagoda.common.text.tokenizer import load_tokenizer
    from pagoda.common.weights.gguf.file import GgufFile

    path = folder / "model.gguf"
    file = GgufFile(path)
    for name in file.tensors:
        try:
            file.tensor(name)
        except ModelError as error:
            check_error(error, folder)
    try:
        _use_tokenizer(load_tokenizer(path, gguf_metadata=file.metadata))
    except ModelError as error:
        check_error(error, folder)
    from pagoda.server.settings.flags import EngineArgs
    from pagoda.server.settings.resolve import resolve

    resolved = resolve(EngineArgs(str(path), backend="reference").create_engine_config(), "server", weights=True)
    _ = resolved.schemes, resolved.rows
    for _ in resolved.checkpoint.tensors():
        pass


# Adapters.


def _adapter_examples() -> list[Files]:
    from support.checkpoints.adapters import llama_modules, write_adapter

    modules = llama_modules(32, 48, 4, 2, 1)
    extra = {
        **{"base_model_name_or_path": "org/model", "bias": "none", "lora_dropout": 0.1, "use_rslora": False},
        **{"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"v_proj": 8}, "modules_to_save": None, "use_dora": False},
        **{"init_lora_weights": True, "task_type": "CAUSAL_LM", "r": 4},
    }
    return [_written(lambda folder: write_adapter(folder, modules, **extra))]


def _mutate_adapter(rng: Random, files: Files) -> Files:
    if rng.random() < 0.6:
        return {**files, "adapter_config.json": mutate_json(rng, files["adapter_config.json"])}
    name = "adapter_model.safetensors"
    return {**files, name: _mutate_safetensors(rng, files[name])}


def read_adapter_folder(folder: Path) -> None:
    """Read a LoRA adapter for a tiny Llama, and what requests say of one."""
    from support.checkpoints.tiny_folder import CONFIG

    from pagoda.common.models.registry import spec_from_config
    from pagoda.common.models.shapes import params
    from pagoda.common.weights.lora.peft import BaseModel, read_adapter
    from pagoda.common.weights.lora.weights import adaptable

    spec, family = spec_from_config(CONFIG)
    read_adapter(folder, BaseModel(family.rules, params(spec), adaptable(spec), 16))


_FALLBACK: Final = ("pagoda.backends.fallback.describe",)

FORMATS: Final[dict[str, Format]] = {
    "gguf": Format(_gguf_examples, mutate_one("model.gguf", _mutate_gguf), read_gguf_file),
    "safetensors": Format(
        _safetensors_examples, mutate_one("model.safetensors", _mutate_safetensors), read_safetensors
    ),
    "index": Format(
        _index_examples,
        mutate_one("model.safetensors.index.json", mutate_json),
        lambda folder: resolve_folder(folder, weights=True),
    ),
    "torch": Format(_torch_examples, mutate_one("pytorch_model.bin", _mutate_torch), read_torch),
    "tensor": Format(_tensor_examples, mutate_one("tensor.pt", _mutate_torch), read_one_tensor, names_file=False),
    "config": Format(_config_examples, mutate_one("config.json", mutate_json), resolve_folder, modules=_FALLBACK),
    "quantization": Format(_quantization_examples, _mutate_quantization, resolve_folder),
    "generation": Format(_generation_examples, mutate_one("generation_config.json", mutate_json), resolve_folder),
    "modules": Format(_module_examples, _mutate_any, resolve_folder, modules=_FALLBACK),
    "tokenizer": Format(_tokenizer_examples, _mutate_tokenizer, read_tokenizer),
    "adapter": Format(_adapter_examples, _mutate_adapter, read_adapter_folder),
}


# Running cases.


@dataclass
class Findings:
    """What went wrong: kind of failure -> (first case, example)."""

    cases: int = 0
    refused: int = 0
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    on_failure: Callable[[str, int, str], None] = lambda kind, case, example: None

    def add(self, kind: str, case: int, example: str) -> None:
        if kind not in self.failures:
            self.failures[kind] = (case, example)
            self.on_failure(kind, case, example)


class BadMessageError(Exception):
    """An error of ours with a message that is not one line, or names no file."""


def check_error(error: Exception, folder: Path | None) -> None:
    """Raise BadMessageError unless the message of one of our errors is one line that names a file."""
    text = str(error)
    if "\n" in text or len(text) > MAX_MESSAGE:
        raise BadMessageError("the message is no line") from error
    if folder is None:
        return
    names = [path.name for path in folder.rglob("*")]
    if str(folder) not in text and not any(name in text for name in names) and "GGUF file" not in text:
        raise BadMessageError("the message names no file") from error


def run(
    name: str,
    cases: Sequence[int],
    seed: int,
    on_case: Callable[[int, int], None] = lambda case, refused: None,
    on_failure: Callable[[str, int, str], None] = lambda kind, case, example: None,
) -> Findings:
    """Run cases of a format in this process. `on_case`: called before each one with the number refused before."""
    from pagoda.common.errors import PagodaError

    findings, kind = Findings(on_failure=on_failure), FORMATS[name]
    examples = kind.examples()
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as top, _fast_start(), _time_limit():
        folder = Path(top) / "model"
        for case in cases:
            on_case(case, findings.refused)
            rng = Random(f"{seed} {name} {case}")
            files = kind.mutate(rng, rng.choice(examples))
            _write(folder, files)
            findings.cases += 1
            try:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                try:
                    kind.read(folder)
                except PagodaError as error:
                    findings.refused += 1
                    check_error(error, folder if kind.names_file else None)
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also SlowError, and the panics of libraries
                findings.add(_kind_of(error), case, _described(error))
    return findings


def _write(folder: Path, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def _fast_start() -> Iterator[None]:
    """Leave out what takes most of a case and depends on the installation alone: plugins, and checks of the machine."""
    from importlib.metadata import entry_points

    from pagoda.common.config import backend_support
    from pagoda.common.config.defaults import Platform
    from pagoda.common.models import registry
    from pagoda.server.settings import resolve

    known = entry_points(group=registry.MODELS)
    with ExitStack() as stack:
        stack.enter_context(patch.object(registry, "entry_points", lambda group: known))
        stack.enter_context(patch.object(backend_support, "notes", lambda config, backend: ()))
        stack.enter_context(patch.object(backend_support, "check_settings", lambda config, backend: None))
        stack.enter_context(patch.object(resolve, "detect", lambda kind, size: Platform("cpu", 8 << 30, "x86_64")))
        yield


@contextmanager
def _time_limit() -> Iterator[None]:
    def end(*_: object) -> None:
        raise SlowError

    before = signal.signal(signal.SIGPROF, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, before)


def _kind_of(error: BaseException) -> str:
    if isinstance(error, BadMessageError):
        cause = error.__cause__
        frames = traceback.extract_tb(None if cause is None else cause.__traceback__)
        return f"{error}: {type(cause).__name__} at {_place(frames)}"
    return f"{type(error).__name__} at {_place(traceback.extract_tb(error.__traceback__))}"


def _place(frames: traceback.StackSummary) -> str:
    ours = [frame for frame in frames if "pagoda" in frame.filename and "fuzz_files" not in frame.filename]
    if not ours:
        return "?"
    last = ours[-1]
    return f"{last.filename.rpartition('pagoda/')[2]}:{last.lineno} {last.name}"


def _described(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, BadMessageError) and error.__cause__ is not None else error
    return f"{type(cause).__name__}: {str(cause)[:300]!r}"


def run_in_child(name: str, cases: range, seed: int, interrupted: threading.Event | None = None) -> Findings:
    """Run cases of a format in child processes with a limit of memory; a death counts as a failure of its case.

    `interrupted`: whether the run is to end.
    """
    total, start = Findings(), cases.start
    with tempfile.NamedTemporaryFile() as progress:
        while start < cases.stop and not (interrupted is not None and interrupted.is_set()):
            case = (name, str(start), str(cases.stop), str(seed), progress.name)
            command = (sys.executable, "-P", __file__, "--child", *case)
            child = subprocess.run(command, capture_output=True, text=True)
            at, refused = map(int, Path(progress.name).read_text().split() or (start, 0))
            for line in child.stdout.splitlines():
                total.add(*json.loads(line))
            total.refused += refused
            total.cases += at + 1 - start
            if child.returncode == 0:
                return total
            last = child.stderr.strip().splitlines()[-1:] or [""]
            total.add(f"the process ended with status {child.returncode}", at, last[0])
            start = at + 1
    return total


def _child(name: str, start: int, stop: int, seed: int, progress: str) -> int:
    with ExitStack() as stack:
        file = stack.enter_context(Path(progress).open("r+b"))

        def announce(case: int, refused: int) -> None:
            os.pwrite(file.fileno(), b"%12d %12d" % (case, refused), 0)

        def print_failure(kind: str, case: int, example: str) -> None:
            print(json.dumps((kind, case, example)), flush=True)

        for module in ("torch", "tokenizers", "pagoda.server.settings.resolve", *FORMATS[name].modules):
            __import__(module)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        run(name, range(start, stop), seed, announce, print_failure)
    return 0


def main() -> int:
    """Run the cases and print what failed."""
    if sys.argv[1:2] == ["--child"]:
        name, start, stop, seed, progress = sys.argv[2:]
        return _child(name, int(start), int(stop), int(seed), progress)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", action="append", choices=sorted(FORMATS), help="only these formats")
    parser.add_argument("--cases", type=int, default=100_000, help="cases of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone, and show its traceback")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="formats at a time")
    args = parser.parse_args()
    names = tuple(args.format or FORMATS)
    if args.only is not None:
        return _show(names[0], args.only, args.seed)
    interrupted = threading.Event()
    with ThreadPoolExecutor(args.jobs) as threads:
        runs = [threads.submit(_run_format, name, args.cases, args.seed, interrupted) for name in names]
        try:
            failed = [each.result() for each in runs]
        except KeyboardInterrupt:
            interrupted.set()
            threads.shutdown(cancel_futures=True)
            return 130
    return 1 if any(failed) else 0


def _run_format(name: str, cases: int, seed: int, interrupted: threading.Event) -> bool:
    """Run a format's cases and print what failed; return whether something did."""
    began = time.monotonic()
    findings = run_in_child(name, range(cases), seed, interrupted)
    seconds = time.monotonic() - began
    lines = [f"{name:13} {findings.cases:7} cases, {findings.refused:7} refused, {seconds:5.0f} s"]
    lines += [f"  {kind}\n    case {case}: {example}" for kind, (case, example) in findings.failures.items()]
    print("\n".join(lines), flush=True)
    return bool(findings.failures)


def _show(name: str, case: int, seed: int) -> int:
    kind = FORMATS[name]
    rng = Random(f"{seed} {name} {case}")
    files = kind.mutate(rng, rng.choice(kind.examples()))
    with tempfile.TemporaryDirectory() as top, _fast_start():
        _write(Path(top) / "model", files)
        kind.read(Path(top) / "model")
    print("it was read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
