"""The contract between engine and backend, steps in flight, the ladder of step shapes, and profiles of steps."""
