"""Weights from rank 0 of a group of processes that exists for one broadcast only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous


@dataclass(frozen=True)
class Broadcast:
    """Where the tensors come from and which, in the order of their coming."""

    group: str
    address: str
    port: int
    rank: int
    world_size: int
    backend: str
    names: list[str]
    dtypes: list[str]
    """As torch names them."""
    shapes: list[list[int]]
    timeout_s: float

    def tensors(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Join the group, receive, leave. Ends with an error if nothing comes within the time-out."""
        group = self._join()
        try:
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                torch.distributed.broadcast(tensor, src=0, group=group)
                yield name, tensor
        finally:
            torch.distributed.destroy_process_group(group)

    def _join(self) -> Any:
        """A group beside the worker's default one, by the names of keys that SGLang uses too."""
        timeout = timedelta(seconds=self.timeout_s)
        where = f"tcp://{self.address}:{self.port}"
        store, rank, size = next(rendezvous(where, self.rank, self.world_size, timeout=timeout))
        store.set_timeout(timeout)
        group, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            c10d.Backend(self.backend),
            c10d.PrefixStore(self.group, store),
            group_name=c10d.GroupName(self.group),
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
        return group
