"""Scenarios of reliability.py, by kind of fault, and what they share: a server's processes, streams, reports."""
