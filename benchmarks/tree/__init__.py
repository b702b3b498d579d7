"""Training sessions as trees against training them row by row: ``python -m benchmarks.tree``."""
