"""What was asked for, and what holds: flags, the configuration settled, and why each setting is what it is."""
