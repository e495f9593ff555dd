"""The engine's process or thread, and the API process's clients: commands, messages, supervision."""
