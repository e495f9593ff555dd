"""Embeddings of LangChain, from a server with an embedding model."""

from __future__ import annotations

from checks import MODEL, V1, check, main
from langchain_openai import OpenAIEmbeddings


def product(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right))


@check
def embeddings() -> float:
    # The check would cut texts with the tokenizer of OpenAI's model.
    embed = OpenAIEmbeddings(model=MODEL, base_url=V1, api_key="none", check_embedding_ctx_length=False)
    near, also, far = embed.embed_documents(["a cat", "a kitten", "tax law"])
    assert product(near, also) > product(near, far)
    assert product(embed.embed_query("a cat"), near) > 0.999
    return product(near, also)


main()
