"""The readable definition of every model: whole sequences in plain torch, without caches."""
