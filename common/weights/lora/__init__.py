"""LoRA adapters: their weights as backends get them, and the files of the library peft."""
