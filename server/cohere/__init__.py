"""The Cohere API."""
