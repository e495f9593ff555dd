"""Texts with which tool calls begin, for formats in which a call ends the thinking.

Models quote the tags of their instructions while they think: only a tag with what follows it in a call is a call.
"""

from typing import Final

JSON_CALLS: Final = ("<tool_call>\n{", "<tool_call>{")
XML_CALLS: Final = ("<tool_call>\n<function=", "<tool_call><function=")
