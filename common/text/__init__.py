"""Everything that knows characters: tokenizers, detokenising, chat templates."""
