"""Media of prompts in the engine: items, the rows of the device that hold them, and what a step encodes."""
