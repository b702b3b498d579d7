"""A run's layers replaced by your own, one short example each."""
