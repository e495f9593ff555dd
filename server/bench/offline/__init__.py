"""Benchmarks of an engine in this process: throughput, latency, start-up."""
