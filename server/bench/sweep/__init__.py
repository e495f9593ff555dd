"""`pagoda bench sweep`: benchmarks over grids of parameters, and plots of their results."""
