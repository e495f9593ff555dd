"""Device backends, loaded one at a time by the registry."""
