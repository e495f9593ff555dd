"""What can be set, each default once."""
