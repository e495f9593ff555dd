"""The torch decoder: assembled from a specification over the functions of a backend."""
