"""Structured output: from a request's constraint to a grammar, its library, and the token mask of each step."""
