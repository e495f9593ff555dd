"""A conversation to answer, whichever API it came through: its tools, its effort, the form of its answer."""
