"""Names that stand in the text, most often without quotes."""

from __future__ import annotations

import re
from typing import Final

from pagoda.server.parsers.tool.scanner import Malformed, Reading, Scanner

LONGEST: Final = 256
QUOTES: Final = ('"', "'")
_CHARACTERS: Final = re.compile(r"[\w.:/$-]*")


def name_of(scanner: Scanner) -> Reading[str]:
    """The name that comes next, white space around it dropped. Raises Malformed where there is none."""
    yield from scanner.space()
    name = yield from scanner.run(_CHARACTERS)
    yield from scanner.space()
    if not 0 < len(name) <= LONGEST:
        raise Malformed
    return name


def quoted_name(scanner: Scanner) -> Reading[str]:
    """The name that comes next, in quotes or not: models put it into those of their own liking."""
    quote = yield from scanner.accept(*QUOTES)
    name = yield from name_of(scanner)
    if quote:
        yield from scanner.expect(quote)
    return name
