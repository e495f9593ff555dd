"""Execute a StepPlan: pack it, run compiled programs, fetch results."""
