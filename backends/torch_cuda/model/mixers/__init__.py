"""Mixers of the NVIDIA backend: attention by kind; `recurrence` has what recurrent ones share, `layers` the kinds."""
