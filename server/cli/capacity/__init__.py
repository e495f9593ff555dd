"""Commands about capacity: calibrate, simulate, plan, replay."""
