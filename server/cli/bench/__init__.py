"""`pagoda bench`: what its sub-commands measure, and how."""
