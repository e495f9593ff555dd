"""Which requests compute what in a step: requests and their queues, the scheduler, fairness between API keys."""
