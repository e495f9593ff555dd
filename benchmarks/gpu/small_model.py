"""A real model small enough to carry: SmolLM2-135M-Instruct in less than 3 bits per weight, packed and unpacked.

Every matrix becomes GGUF's Q4_0. A block's scale is a fraction of its row's root mean square, doubled until its largest
weight fits: most of the 16 levels are then rare, and a Huffman code takes under 3 bits per weight. The result is not
the best fit, but a trained model that answers in sentences; backends are compared on the same file.

`pack` needs the package gguf; `unpack` needs numpy alone. A packed file: a line of JSON with the offset of each matrix
in the GGUF file and its number of blocks; the levels of all matrices; all other bytes; both compressed, in different
ways.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

BLOCK, BYTES = 32, 18
"""Q4_0: weights per block, and bytes per block, two of them the scale."""
EMBEDDING = "token_embd.weight"
STEP, EMBEDDING_STEP = 0.55, 0.7
"""Fractions of a row's root mean square. With 0.6 for the layers, the answers are no longer sentences."""


def pack(source: Path, target: Path) -> None:
    """Quantize and compress the GGUF file `source`."""
    plain = target.with_suffix(".unpacked")
    _quantise(source, plain)
    content, matrices = np.fromfile(plain, np.uint8), _matrices(plain)
    plain.unlink()
    is_level = _levels_of(matrices, content.size)
    squeeze = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
    codes = squeeze.compress(content[is_level].tobytes()) + squeeze.flush()
    rest = zlib.compress(content[~is_level].tobytes(), 9)
    head = {"matrices": matrices, "size": content.size, "levels": len(codes)}
    target.write_bytes(json.dumps(head).encode() + b"\n" + codes + rest)


def unpack(source: Path, target: Path) -> None:
    """Write the GGUF file that `pack` compressed, atomically."""
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
    """Return bool [bytes of the file]: which bytes are levels of a matrix."""
    is_level = np.zeros(size, np.bool_)
    for offset, blocks in matrices:
        is_level[offset : offset + blocks * BYTES].reshape(blocks, BYTES)[:, 2:] = True
    return is_level


def levels(weights: np.ndarray, step: float) -> np.ndarray:
    """Return Q4_0 blocks, uint8 [rows, bytes of a row], of weights float32 [rows, columns]."""
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
    """Write the same model with Q4_0 matrices."""
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
    """Return (offset in the file, blocks) of every quantized tensor."""
    import gguf

    return [
        (int(tensor.data_offset), int(tensor.n_bytes) // BYTES)
        for tensor in gguf.GGUFReader(path).tensors
        if tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
    ]
