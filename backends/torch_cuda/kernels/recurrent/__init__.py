"""Kernels over recurrent states: `state_step` has the sequences of a step, `chunks` what the kernels share."""
