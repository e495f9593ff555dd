"""From a StepPlan to compiled programs and results."""
