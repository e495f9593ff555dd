"""Products of activations with weights of 8 or 4 bits."""
