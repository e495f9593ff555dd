"""Settings whose value is an object with keys of its own, such as --speculative-config."""
