"""Parsers of model output: reasoning, content and tool calls. One incremental parser per format."""
