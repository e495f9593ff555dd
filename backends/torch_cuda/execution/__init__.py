"""From a StepPlan to tensors, CUDA graphs and results."""
