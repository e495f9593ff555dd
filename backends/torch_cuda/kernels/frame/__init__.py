"""What every kernel folder shares: launch descriptions, bound launches, ahead-of-time compilation, float8."""
