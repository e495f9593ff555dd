"""Execution: StepPlan to device tensors, CUDA graphs and results."""
