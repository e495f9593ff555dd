"""Shared fixtures. Nothing here imports torch: engine and text tests stay framework-free."""
