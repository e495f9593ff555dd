"""Input and output processing: prompts become engine requests, tokens and vectors become outputs."""
