"""Commands about this machine: doctor, collect-env."""
