"""Hook of MkDocs: what the pages of docs/ need to read on a site as they do in the repository.

Links that leave docs/ become the names of the files, which a site without the repository lacks. The comment at the head
of generated pages goes, since it would hide the page's title from the navigation, and so does the backslash before a
pipe in code in a table, which MkDocs, unlike GitHub, would show.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]*)(#[^)\s]*)?\)")
_COMMENT: Final = re.compile(r"\A<!--.*?-->\s*", re.DOTALL)
_ROW: Final = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`]+`")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page as MkDocs is to read it."""
    folder = Path(page.file.src_uri).parent
    linked = _LINK.sub(lambda link: _shown(link, folder), _COMMENT.sub("", markdown))
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), linked)


def _shown(link: re.Match[str], folder: Path) -> str:
    text, target = link[1], os.path.normpath(folder / link[2])
    if not target.startswith("..") and not (DOCS / target).is_dir():
        return link[0]
    name = os.path.normpath(Path("docs") / target)
    return text if name in text.strip("`") else f"{text} (`{name}`)"
