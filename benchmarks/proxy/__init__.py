"""``make bench-proxy``: the trajectory proxy against its peers. See :mod:`benchmarks.proxy.__main__`."""
