"""Dense decoders of LayerNorm or plain MLPs, as GPT has them."""
