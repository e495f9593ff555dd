"""Request fields that say what an answer must look like, in OpenAI's, vLLM's and older vLLM's words."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from pagoda.common.errors import RequestError
from pagoda.common.sampling_params import StructuredOutputsParams
from pagoda.server.http.fields.base import RequestBody, unsupported

MAX_CHOICES: Final = 65_536


class TextFormat(RequestBody):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    """Some JSON object."""

    type: Literal["json_object"]


class NamedSchema(RequestBody):
    """A JSON schema. `strict` changes nothing: an answer always keeps to its schema."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuralTagFormat(RequestBody):
    """Text in which tags switch a form on: vLLM's `format`, or OpenAI's `structures` and `triggers`."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class StructuredOutputs(RequestBody):
    """vLLM's own: exactly one form, and how JSON is written."""

    json_schema: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool | None = Field(None, description="Changes nothing: no second backend is ever tried.")
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def params(self) -> StructuredOutputsParams:
        """The form. Raises RequestError unless there is exactly one."""
        return StructuredOutputsParams(
            json=self.json_schema,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=self.json_object,
            structural_tag=self.structural_tag,
            disable_any_whitespace=bool(self.disable_any_whitespace),
            disable_additional_properties=bool(self.disable_additional_properties),
            whitespace_pattern=self.whitespace_pattern,
        )


class StructuredFields(RequestBody):
    """Fields of every request that generates text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=MAX_CHOICES)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Any = unsupported(
        harmless=("auto", "guidance"), why="the server's --structured-outputs-config chooses"
    )

    def structure(self) -> StructuredOutputsParams | None:
        """The form of an answer; None: any. Raises RequestError naming the field."""
        forms = self._forms()
        if len(forms) > 1:
            first, second = list(forms)[:2]
            raise RequestError(second, f"{second} and {first} both give the answer's form; leave one of them out")
        if self.guided_whitespace_pattern is not None and "guided_json" not in forms:
            raise RequestError("guided_whitespace_pattern", "guided_whitespace_pattern needs guided_json")
        return next(iter(forms.values()), None)

    @property
    def gives_structure(self) -> bool:
        """Whether any field gives a form; if none does, tools that must be called have it."""
        return bool(self._given())

    @property
    def structure_field(self) -> str:
        """The field that gives the form."""
        return next(iter(self._given()), "structured_outputs")

    def _given(self) -> list[str]:
        names = ("response_format", "structured_outputs", *_GUIDED)
        return [
            name
            for name in names
            if getattr(self, name) is not None and not isinstance(getattr(self, name), TextFormat)
        ]

    def _forms(self) -> dict[str, StructuredOutputsParams]:
        return {name: self._form(name) for name in self._given()}

    def _form(self, name: str) -> StructuredOutputsParams:
        value = getattr(self, name)
        if name == "structured_outputs":
            found: StructuredOutputsParams = value.params()
            return found
        if name == "response_format":
            return _of_format(value)
        if name == "guided_choice" and not value:
            raise RequestError(name, "guided_choice is empty: no answer would fit")
        pattern = self.guided_whitespace_pattern if name == "guided_json" else None
        return StructuredOutputsParams(**{_GUIDED[name]: value}, whitespace_pattern=pattern)


_GUIDED: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Older name -> the form."""


def _of_format(found: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat) -> StructuredOutputsParams:
    name = "response_format"
    if isinstance(found, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    if isinstance(found, JsonSchemaFormat):
        if found.json_schema.json_schema is None:
            raise RequestError(name, f"{name}.json_schema needs a schema; for any object use type json_object")
        return StructuredOutputsParams(json=found.json_schema.json_schema)
    tag = found.model_dump(exclude_none=True)
    return StructuredOutputsParams(structural_tag=tag)
