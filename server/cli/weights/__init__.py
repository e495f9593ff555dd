"""Commands that prepare models: compile, convert."""
