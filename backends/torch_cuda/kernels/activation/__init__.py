"""The activation between the two products of an MLP."""
