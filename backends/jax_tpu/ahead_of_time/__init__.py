"""`pagoda compile`: programs compiled for TPUs on a machine without one, with their cost."""
