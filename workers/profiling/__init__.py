"""Measures a node: a process of its own, with the node's threads, so that nothing heavy runs in an agent."""
