"""Hook of MkDocs: links that leave docs/ become the names of the files, which a site without the repository lacks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with its links out of docs/, and to folders of it, as text."""
    folder = Path(page.file.src_uri).parent
    return _LINK.sub(lambda link: _shown(link, folder), markdown)


def _shown(link: re.Match[str], folder: Path) -> str:
    text, target = link[1], os.path.normpath(folder / link[2])
    if not target.startswith("..") and not (DOCS / target).is_dir():
        return link[0]
    name = os.path.normpath(Path("docs") / target)
    return text if name in text.strip("`") else f"{text} (`{name}`)"
