"""Experts with matrices and activations of 8 bits; `moe` decides where they are used and has the definition."""
