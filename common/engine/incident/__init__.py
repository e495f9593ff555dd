"""Incident snapshots: what the scheduler did before an engine failed, in a file that can be replayed."""
