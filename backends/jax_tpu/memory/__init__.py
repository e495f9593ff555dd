"""Device memory: what a model takes, and how many KV blocks fit."""
