"""Which of several GGUF files a person means. Knows file names only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from pagoda.common.errors import ModelError

_PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_NO_MODELS: Final = ("mmproj", "imatrix")  # in the names of files that come beside models


def with_models(folder: Path) -> list[str]:
    """The .gguf files of a folder and its sub-folders, as paths within it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))


def pick_gguf(names: Sequence[str], quant: str = "") -> str:
    """The one GGUF model among `names`, or the one that `quant` names: Q4_K_M, in any case, or a file's own name.

    Raises ModelError, listing what there is, when there is none or a choice to make.
    """
    files = [name for name in names if _is_model(name)]
    if not files:
        raise ModelError("it holds no GGUF file; " + (f"drop :{quant}" if quant else "drop --load-format gguf"))
    found = [name for name in files if _matches(name, quant)] if quant else files
    if not found:
        raise ModelError(f"no GGUF file in it is {quant}; there are: {', '.join(files)}")
    if all(_PART.search(name) for name in found) and len(found) > 1:
        raise ModelError(
            f"its GGUF file is split into {len(found)} parts; merge them (llama-gguf-split --merge) and give the file"
        )
    if len(found) > 1:
        example = PurePosixPath(found[0]).stem
        raise ModelError(f"it holds several GGUF files; name one after a colon, like :{example}: {', '.join(found)}")
    return found[0]


def _is_model(name: str) -> bool:
    base = PurePosixPath(name).name.lower()
    return base.endswith(".gguf") and not any(word in base for word in _NO_MODELS)


def _matches(name: str, quant: str) -> bool:
    """Whether `quant` is the file's name, or stands in it between separators: Q4_K is not in x-Q4_K_M.gguf."""
    path = PurePosixPath(name)
    if quant in (path.name, path.stem):
        return True
    stem = _PART.sub("", path.name).removesuffix(".gguf")
    return re.search(rf"(?:^|[-._]){re.escape(quant)}(?:$|[-.])", stem, re.IGNORECASE) is not None
