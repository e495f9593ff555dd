"""`pagoda compile`: compile programs for a TPU on a machine without one, and estimate their cost."""
