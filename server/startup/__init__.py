"""From a resolved configuration to a running engine: backend, weights, memory plan, ranks, warm-up."""
