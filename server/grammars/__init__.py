"""The grammars of one server: tried in a process of their own, compiled in the engine."""
