"""Child processes and threads for text from clients: templates, tokenising, grammars."""
