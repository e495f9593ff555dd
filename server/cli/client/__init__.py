"""Commands that talk to a running server: chat, complete."""
