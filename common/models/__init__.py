"""Models as data: the vocabulary, and one file per family."""
