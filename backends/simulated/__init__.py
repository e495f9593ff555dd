"""The backend without a device: the production scheduler against a model of how long a step takes."""
