"""The sub-commands of `pagoda`, a module each, imported when called."""
