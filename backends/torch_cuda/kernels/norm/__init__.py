"""RMSNorm and LayerNorm of a row, with the residual added before and 8-bit numbers after."""
