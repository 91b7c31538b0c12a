"""Models that run whole or on a shard."""
