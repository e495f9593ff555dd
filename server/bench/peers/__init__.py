"""pagoda beside other engines: each in a process of its own, measured in turns."""
