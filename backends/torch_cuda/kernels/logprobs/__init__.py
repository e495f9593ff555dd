"""Log-probabilities of chosen tokens, their ranks, and the best few."""
