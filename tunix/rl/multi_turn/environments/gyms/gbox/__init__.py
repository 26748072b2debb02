"""The `gbox` gym: one gbox.ai machine per episode."""
