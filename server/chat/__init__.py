"""Conversations, shared by all chat APIs: rendering, tools, tool grammars."""
