"""Declaration of all settings, their defaults and environment variables."""
