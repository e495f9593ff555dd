"""Mixers with recurrent state: `recurrence` has what they share, `layers` the kinds."""
