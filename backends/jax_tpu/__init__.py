"""The TPU backend in JAX; on a machine without a TPU the same programs run on XLA's CPU client."""
