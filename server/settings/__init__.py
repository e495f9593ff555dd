"""Command-line flags, EngineArgs, help, and resolution of the configuration for a model and a machine."""
