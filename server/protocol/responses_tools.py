"""Tools, the choice among them, and the form of the text, as the Responses API writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from pagoda.common.errors import RequestError
from pagoda.common.structured_outputs import StructuredOutputsParams
from pagoda.server.conversation.conversation import NamedTool
from pagoda.server.conversation.conversation import ToolChoice as Choice
from pagoda.server.protocol.base import Body, hint
from pagoda.server.protocol.tagged import LIST, OTHER, TEXT, OtherTool, Unsupported, by_type, refused, text_or_list


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Any = hint(why="all tools are shown to the model at once")
    allowed_callers: Annotated[Any, refused(["direct"])] = None
    output_schema: Any = hint()

    def as_chat(self) -> dict[str, Any]:
        """The tool in the shape of chat completions."""
        function = {key: value for key, value in self.shown().items() if key != "type" and value is not None}
        return {"type": "function", "function": function}

    def shown(self) -> dict[str, Any]:
        """What a response says about it."""
        return self.model_dump(include={"type", "name", "description", "parameters", "strict"})


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag(OTHER)],
    by_type("function"),
]


class FunctionChoice(Body):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class AllowedChoice(Body):
    """Functions out of which the model may choose, or must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)]
    | Annotated[
        Annotated[FunctionChoice, Tag("<function>")]
        | Annotated[AllowedChoice, Tag("<allowed_tools>")]
        | Annotated[Unsupported, Tag(OTHER)],
        by_type("function", "allowed_tools"),
        Tag(LIST),
    ],
    text_or_list(),
]


def chosen(tools: Sequence[FunctionTool], choice: Any) -> tuple[list[dict[str, Any]], Choice]:
    """The tools to offer, in the shape of chat completions, and the choice among them. Raises RequestError."""
    offered = [tool.as_chat() for tool in tools]
    if isinstance(choice, FunctionChoice):
        return offered, NamedTool(choice.name)
    if isinstance(choice, AllowedChoice):
        names = [tool.name for tool in choice.tools]
        unknown = next((name for name in names if name not in {tool.name for tool in tools}), None)
        if unknown is not None:
            raise RequestError("tool_choice", f"tool_choice allows {unknown[:128]!r}, which is not among the tools")
        return [tool for tool in offered if tool["function"]["name"] in names], choice.mode
    if choice == "required":
        return offered, "required"
    return offered, "auto" if choice != "none" and offered else "none"


class TextFormat(Body):
    """The form of the text. `strict` makes no difference: an answer always has the form that was asked for."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """What the text is like."""

    format: TextFormat | None = None
    verbosity: Any = hint(harmless=("medium",), why="no model served here has levels of it")

    def structured(self) -> StructuredOutputsParams | None:
        """What holds the answer to its form. Raises RequestError."""
        form = self.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if form.schema_ is None or not form.name:
            raise RequestError("text", "text.format needs a name and a schema")
        return StructuredOutputsParams(json=form.schema_)

    def shown(self) -> Mapping[str, Any]:
        """What a response says about it."""
        form = self.format
        told = form.model_dump(by_alias=True, exclude_unset=True) if form is not None else {"type": "text"}
        return {"format": told, "verbosity": "medium"}
