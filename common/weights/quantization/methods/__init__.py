"""One quant_method of config.json per file: its section, and the tensors of a layer."""
