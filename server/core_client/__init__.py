"""The engine's process, or thread, and the API's side of it: commands, steps, and the watch over its life."""
