"""The HTTP APIs, a folder each, the application that serves them, and what conversations become."""
