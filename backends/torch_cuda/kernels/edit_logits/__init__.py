"""What requests do to logits before temperature: penalties, bias, bans and masks."""
