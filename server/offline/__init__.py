"""The offline faces: LLM, and LLMEngine, which its caller drives step by step."""
