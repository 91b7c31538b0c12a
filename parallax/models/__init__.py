"""Models whose functions take the whole model, or one device's shard of it."""
