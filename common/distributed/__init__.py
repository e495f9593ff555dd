"""Several processes that run one model, on several hosts or as ranks on one: how they meet and do the same steps."""
