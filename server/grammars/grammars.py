"""The grammars of one server: what compiles them in the engine, and what tries them before."""

from __future__ import annotations

from pagoda.common.config.engine import EngineConfig
from pagoda.common.engine.structured import Structured
from pagoda.common.structured.refusal import no_tokenizer
from pagoda.common.structured.vocabulary import Vocabulary, vocabulary_of
from pagoda.common.text.tokenizer import Tokenizer
from pagoda.server.grammars.check import GrammarCheck
from pagoda.server.requests.inputs import open_tokenizer
from pagoda.server.wire import EngineInfo


def structured_of(config: EngineConfig, info: EngineInfo) -> Structured | None:
    """For the engine; it opens the tokenizer when the first grammar comes. None without a tokenizer."""
    if config.model.skip_tokenizer_init:
        return None

    def vocabulary() -> Vocabulary:
        tokenizer = open_tokenizer(config)
        return _vocabulary(tokenizer and tokenizer.with_vocab(info.vocab_size), info)

    return Structured(vocabulary)


def check_of(tokenizer: Tokenizer | None, info: EngineInfo) -> GrammarCheck:
    """For the API process."""
    return GrammarCheck(lambda: _vocabulary(tokenizer, info))


def _vocabulary(tokenizer: Tokenizer | None, info: EngineInfo) -> Vocabulary:
    if tokenizer is None:
        raise no_tokenizer()
    return vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids)
