"""Devices: meshes, shardings, several hosts, and the platform."""
