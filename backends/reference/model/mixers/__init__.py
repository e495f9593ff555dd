"""Mixers of the CPU backend, a file per kind; `recurrence` has what recurrent ones share."""
