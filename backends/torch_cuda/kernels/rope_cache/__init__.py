"""What stands between the projection of q, k, v and attention: QK norm, rotary positions, K and V into the cache."""
