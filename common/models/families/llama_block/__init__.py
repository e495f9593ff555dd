"""Dense decoders of RMSNorm, RoPE and gated MLPs, as Llama has them, and their mixtures where one file holds both."""
