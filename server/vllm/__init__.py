"""Names, types and views of vLLM that scripts import."""
