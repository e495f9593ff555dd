"""Mixers with recurrent state, a file per kind; `recurrence` has what they share."""
