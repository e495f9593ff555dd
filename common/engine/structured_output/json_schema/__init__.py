"""JSON schemas that no grammar library takes as they are, rewritten as grammars."""
