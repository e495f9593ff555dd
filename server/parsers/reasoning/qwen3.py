"""Qwen3 and its successors, and others that write as they do: MiMo, Nemotron 3.

Those that only think have a template that opens the thinking.
"""

from typing import Final

from pagoda.server.parsers.reasoning.calls import JSON_CALLS, XML_CALLS
from pagoda.server.parsers.reasoning.tagged import TaggedFormat

QWEN3: Final = TaggedFormat(calls=(*JSON_CALLS, *XML_CALLS))
