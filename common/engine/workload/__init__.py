"""Requests that arrive over time: the terms of capacity planning, and an engine core that is driven over them."""
