"""A request's way in and out: prompts become the engine's requests, its tokens and vectors become what callers read."""
