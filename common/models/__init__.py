"""Model specifications, config.json readers and one file per model family."""
