"""LoRA adapters in the engine: which one a request uses, slots in device memory, and the host cache behind them."""
