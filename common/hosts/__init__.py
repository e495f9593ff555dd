"""Several hosts that run one model: how they meet, and how they do the same steps."""
