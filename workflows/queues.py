"""Names of the task queues: one place for workflows, workers and the command line."""

from __future__ import annotations

CONTROL_QUEUE = "sf-control"


def node_queue(node: str) -> str:
    """Task queue for the work of a lease member on ``node``."""
    return f"sf-node-{node}"


def nodectl_queue(node: str) -> str:
    """Task queue for short control work on ``node`` (probe, kill) that no long activity may delay."""
    return f"sf-nodectl-{node}"


def tag_queue(tag: str) -> str:
    """Task queue for shared work of every worker that has ``tag``."""
    return f"sf-tag-{tag}"
