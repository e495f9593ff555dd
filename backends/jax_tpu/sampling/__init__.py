"""Sampling: device functions (`device`) and the host code that packs their inputs and runs them (`sampler`)."""
