"""A model's tokenizer with the interface of Hugging Face's, which scripts expect of `LLM.get_tokenizer()`.

It needs the package tokenizers alone; transformers is not imported.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from pagoda.common.text.chat_template import render_chat, template_of
from pagoda.common.text.tokenizer import Tokenizer

Ids = int | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Tensors = Literal["np", "pt"]


class TokenizedTexts(dict[str, Any]):
    """Keys are attributes, too: `input_ids`, `attention_mask` and, if asked for, `offset_mapping`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class HfTokenizer:
    """Methods have Hugging Face's names, parameters and defaults. Awaiting it returns itself."""

    is_fast = True

    def __init__(self, tokenizer: Tokenizer, name: str = "", max_length: int | None = None) -> None:
        """`name`: of the model; `max_length`: tokens that the model takes."""
        self._tokenizer = tokenizer
        self.name_or_path = name
        # Hugging Face's "no limit" is this number.
        self.model_max_length = int(1e30) if max_length is None else max_length
        self._pad_token_id: int | None = None
        self.padding_side: Literal["left", "right"] = "right"
        self.truncation_side: Literal["left", "right"] = "right"

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        padding: bool | Literal["longest", "max_length"] = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Tensors | None = None,
        return_attention_mask: bool = True,
        return_offsets_mapping: bool = False,
    ) -> TokenizedTexts:
        """Tokenise one text or several; of one without tensors the values are lists of numbers, else one per text.

        `truncation`: to `max_length`, or what the model takes. Raises ValueError for offsets of pairs or cut texts, and
        for tensors of texts of several lengths without padding.
        """
        limit = (max_length or self.model_max_length) if truncation else None
        single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else list(text)
        rows = [self._ids(text, text_pair, add_special_tokens, limit) for text in texts]
        masks = [[1] * len(row) for row in rows]
        if padding:
            longest = max_length if padding == "max_length" else max(map(len, rows), default=0)
            assert longest is not None, "padding to max_length needs max_length"
            rows = [self._padded(row, longest, self.pad_token_id or 0) for row in rows]
            masks = [self._padded(mask, longest, 0) for mask in masks]
        result: dict[str, Any] = {"input_ids": rows}
        if return_attention_mask:
            result["attention_mask"] = masks
        if return_offsets_mapping:
            if text_pair is not None or padding or limit is not None:
                raise ValueError("return_offsets_mapping is for single texts, neither padded nor truncated")
            result["offset_mapping"] = [self._tokenizer.offsets(text, add_special_tokens) for text in texts]
        if return_tensors is not None:
            if len({len(row) for row in rows}) > 1:
                raise ValueError("texts of several lengths make no tensor; set padding=True")
            return TokenizedTexts({key: _tensor(value, return_tensors) for key, value in result.items()})
        return TokenizedTexts({key: value[0] for key, value in result.items()} if single else result)

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: Tensors | None = None,
    ) -> Any:
        """Return the ids of a text, a list or with `return_tensors` an array [1, tokens]."""
        limit = (max_length or self.model_max_length) if truncation else None
        ids = self._ids(text, text_pair, add_special_tokens, limit)
        return ids if return_tensors is None else _tensor([ids], return_tensors)

    def decode(self, token_ids: Ids, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(_listed(token_ids), skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Ids], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of ids."""
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as the vocabulary spells them."""
        return [self._tokenizer.token_name(id) for id in self._tokenizer.encode(text, add_special_tokens)]

    def convert_ids_to_tokens(self, ids: Ids, skip_special_tokens: bool = False) -> Any:
        """Return the token of an id, or the tokens of several, as the vocabulary spells them."""
        if isinstance(ids, int):
            return self._tokenizer.token_name(ids)
        special = self._tokenizer.special_ids if skip_special_tokens else ()
        return [self._tokenizer.token_name(id) for id in _listed(ids) if id not in special]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or the ids of several; of unknown ones that of the unknown token, or None."""
        if isinstance(tokens, str):
            token_id = self._tokenizer.backend.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens as the vocabulary spells them."""
        table = self._tokenizer.byte_table
        if table is not None and table.has_literal:
            return self.decode([id for id in self.convert_tokens_to_ids(tokens) if id is not None])
        decoder = self._tokenizer.backend.decoder
        return "".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))

    def apply_chat_template(
        self,
        conversation: Messages | Sequence[Messages],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_tensors: Tensors | None = None,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Render a conversation, or several, and return the text, or with `tokenize` its ids.

        `return_dict`: input_ids and attention_mask instead of ids. `variables`: further ones of the template. Raises
        RequestError for a model without a template, and if the template refuses the conversation.
        """
        single = not conversation or isinstance(conversation[0], Mapping)
        texts = [
            render_chat(
                self._tokenizer,
                messages,  # type: ignore[arg-type]
                template=chat_template,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            for messages in ([conversation] if single else conversation)
        ]
        rendered = texts[0] if single else texts
        if not tokenize:
            return rendered
        tokens = self(rendered, add_special_tokens=False, return_tensors=return_tensors)
        return tokens if return_dict else tokens.input_ids

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Return `chat_template`, or the model's template of that name, else its template for these tools.

        Raises ValueError for a model without a template.
        """
        if chat_template is not None:
            return self._tokenizer.chat_templates.get(chat_template, chat_template)
        template = template_of(self._tokenizer, None, with_tools=bool(tools))
        if template is None:
            raise ValueError("the model has no chat template; pass chat_template")
        return template

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, added tokens included."""
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Return added token -> id."""
        added = self._tokenizer.backend.get_added_tokens_decoder()
        return {str(token.content): id for id, token in added.items()}

    def save_pretrained(self, save_directory: str) -> None:
        """Write tokenizer.json and tokenizer_config.json into a folder. Raises OSError."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(folder)

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary without added tokens."""
        return self._tokenizer.backend.get_vocab_size(with_added_tokens=False)

    @property
    def max_token_id(self) -> int:
        return max(self.get_vocab().values())

    @property
    def chat_template(self) -> str | None:
        """The default chat template, jinja source."""
        return self._tokenizer.chat_template

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Role -> token, such as "eos_token" -> "</s>"."""
        return dict(self._tokenizer.special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens that have a role."""
        return list(dict.fromkeys(self._tokenizer.special_tokens.values()))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of `all_special_tokens`."""
        ids: list[int] = self.convert_tokens_to_ids(self.all_special_tokens)
        return ids

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def pad_token(self) -> str | None:
        if self._pad_token_id is not None:
            return self._tokenizer.token_name(self._pad_token_id)
        return self._tokenizer.special_tokens.get("pad_token")

    @pad_token.setter
    def pad_token(self, token: str) -> None:
        token_id = self._tokenizer.backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the vocabulary has no token {token!r}")
        self._pad_token_id = token_id

    @property
    def pad_token_id(self) -> int | None:
        return self._tokenizer.pad_token_id if self._pad_token_id is None else self._pad_token_id

    @pad_token_id.setter
    def pad_token_id(self, token_id: int | None) -> None:
        self._pad_token_id = token_id

    @property
    def unk_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        token = self.unk_token
        return None if token is None else self._tokenizer.backend.token_to_id(token)

    def _ids(self, text: str, pair: str | None, special: bool, limit: int | None) -> list[int]:
        if pair is not None or (special and limit is not None):
            return self._tokenizer.encode_within(limit, text, pair, self.truncation_side)[0]
        ids = self._tokenizer.encode(text, special)
        if limit is None or len(ids) <= limit:
            return ids
        return ids[:limit] if self.truncation_side == "right" else ids[len(ids) - limit :]

    def _padded(self, row: list[int], length: int, value: int) -> list[int]:
        padding = [value] * (length - len(row))
        return row + padding if self.padding_side == "right" else padding + row


def resolve_chat_template(
    tokenizer: HfTokenizer,
    chat_template: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    model_config: Any = None,
) -> str | None:
    """Return `chat_template`, else the tokenizer's template for these tools; None for a model without a template.

    `model_config` has no effect: the tokenizer has the model's template.
    """
    try:
        return tokenizer.get_chat_template(chat_template, tools=tools)
    except ValueError:
        return None


def _listed(ids: Any) -> list[int]:
    """Return ids of a list, an array or a tensor as numbers."""
    if isinstance(ids, int):
        return [ids]
    return [int(id) for id in (ids.tolist() if hasattr(ids, "tolist") else ids)]


def _tensor(rows: list[Any], kind: Tensors) -> Any:
    """Return an array of the caller's own library."""
    return np.array(rows) if kind == "np" else import_module("torch").tensor(rows)
