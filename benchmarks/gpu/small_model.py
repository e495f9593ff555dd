"""A real model small enough to travel: SmolLM2-135M-Instruct in less than 3 bits a weight, packed and unpacked.

Every matrix becomes Q4_0 of GGUF. The scale of a block is a part of the root mean square of its row, doubled until its
largest weight fits: most of the 16 levels are then rare, and a Huffman code takes under 3 bits a weight. It is not the
best that fits, but a trained model that answers in sentences; what is compared is backends on the same file.

`pack` needs the package gguf; `unpack` needs numpy alone. A packed file: a line of JSON, which names the place of each
matrix in the GGUF file and its number of blocks; the levels of all matrices; all other bytes, each part compressed in
its own way.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

BLOCK, BYTES = 32, 18
"""Of Q4_0: weights of a block, and its bytes, two of them the scale."""
EMBEDDING = "token_embd.weight"
STEP, EMBEDDING_STEP = 0.55, 0.7
"""Of a row's root mean square. With 0.6 for the layers the model's answers are no longer sentences."""


def pack(source: Path, target: Path) -> None:
    """Quantise and compress the GGUF file `source`."""
    plain = target.with_suffix(".unpacked")
    _quantise(source, plain)
    content, places = np.fromfile(plain, np.uint8), _matrices(plain)
    plain.unlink()
    is_level = _levels_of(places, content.size)
    squeeze = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
    codes = squeeze.compress(content[is_level].tobytes()) + squeeze.flush()
    rest = zlib.compress(content[~is_level].tobytes(), 9)
    head = {"matrices": places, "size": content.size, "levels": len(codes)}
    target.write_bytes(json.dumps(head).encode() + b"\n" + codes + rest)


def unpack(source: Path, target: Path) -> None:
    """The GGUF file that `pack` compressed, under its name once it is whole."""
    line, _, packed = source.read_bytes().partition(b"\n")
    head = json.loads(line)
    is_level = _levels_of(head["matrices"], head["size"])
    content = np.empty(head["size"], np.uint8)
    content[is_level] = np.frombuffer(zlib.decompress(packed[: head["levels"]]), np.uint8)
    content[~is_level] = np.frombuffer(zlib.decompress(packed[head["levels"] :]), np.uint8)
    part = target.with_suffix(".part")
    content.tofile(part)
    part.replace(target)


def _levels_of(matrices: list, size: int) -> np.ndarray:
    """bool [bytes of the file]: those that are levels of a matrix, and not its scales or anything else."""
    found = np.zeros(size, np.bool_)
    for offset, blocks in matrices:
        found[offset : offset + blocks * BYTES].reshape(blocks, BYTES)[:, 2:] = True
    return found


def levels(weights: np.ndarray, step: float) -> np.ndarray:
    """Q4_0 blocks, uint8 [rows, bytes of a row], of weights float32 [rows, columns]."""
    blocks = weights.astype(np.float32).reshape(len(weights), -1, BLOCK)
    usual = np.maximum(np.sqrt(np.square(blocks).mean((1, 2), keepdims=True)) * step, 2.0**-14)
    wider = np.ceil(np.log2(np.maximum(np.abs(blocks).max(-1, keepdims=True) / (7.5 * usual), 1)))
    scale = usual * 2.0**wider
    level = np.clip(np.rint(blocks / scale), -8, 7)
    rounded = level * scale
    length = np.maximum(np.square(rounded).sum((1, 2), keepdims=True), 1e-20)
    scale = (scale * (blocks * rounded).sum((1, 2), keepdims=True) / length).astype(np.float16)  # least squares
    code = (level + 8).astype(np.uint8)
    packed = code[:, :, : BLOCK // 2] | code[:, :, BLOCK // 2 :] << 4
    return np.concatenate([scale.view(np.uint8), packed], -1).reshape(len(weights), -1)


def _quantise(source: Path, target: Path) -> None:
    """The same model with other matrices."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim < 2:
            writer.add_tensor(tensor.name, weights)
        else:
            step = EMBEDDING_STEP if tensor.name == EMBEDDING else STEP
            writer.add_tensor(tensor.name, levels(weights, step), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(path: Path) -> list[tuple[int, int]]:
    """(offset in the file, blocks) of every quantised tensor."""
    import gguf

    return [
        (int(tensor.data_offset), int(tensor.n_bytes) // BYTES)
        for tensor in gguf.GGUFReader(path).tensors
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
    ]
