"""Meshes, shardings, hosts and the platform."""
