"""The sending side of a :class:`~workers.engines.base.Transfer`: rank 0 broadcasts weights to the engines' ranks.

Engines name the tensors they expect from the headers of the published checkpoint, so they are sent in the order of
:func:`workers.engines.checkpoint.stored_tensors`. As a process, from the files::

    python -m workers.trainer.broadcast --weights DIR --address HOST --port N --world-size 2 --group g1

``--serve`` alone sends one checkpoint after another, each by a line of these words on its standard input.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from storage.errors import TrainerError
from workers.engines.base import Transfer
from workers.engines.checkpoint import stored_tensors

log = logging.getLogger(__name__)


def send(transfer: Transfer, tensors: Iterable[Tensor], *, timeout_s: float) -> int:
    """Broadcast ``tensors`` once every rank has joined; returns how many there were.

    Raises:
        TrainerError: a rank did not come, or was lost, within ``timeout_s``.
    """
    device = torch.device("cuda" if transfer.backend == "nccl" else "cpu")
    count = 0
    try:
        with joined(transfer, timeout_s) as group:
            for tensor in tensors:
                dist.broadcast(tensor.detach().to(device).contiguous(), src=0, group=group)
                count += 1
    except (dist.DistError, RuntimeError) as error:  # gloo's own errors are plain RuntimeErrors
        raise TrainerError(f"broadcast {transfer.group} failed after {count} tensors: {error}") from error
    return count


@contextmanager
def joined(transfer: Transfer, timeout_s: float, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Membership, as the sender unless ``rank`` says otherwise, in a group beside the process's default one.

    There need not be a default one. Engines find the group by its name in the store, so its keys carry the name as a
    prefix.
    """
    timeout = timedelta(seconds=timeout_s)
    where = f"tcp://{transfer.address}:{transfer.port}"
    store, rank, size = next(rendezvous(where, rank, transfer.world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(transfer.backend),
        c10d.PrefixStore(transfer.group, store),
        group_name=c10d.GroupName(transfer.group),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def stored(directory: Path) -> Iterator[Tensor]:
    """The tensors of a checkpoint in the order in which engines expect them."""
    for entry in stored_tensors(directory):
        with safe_open(entry.file, framework="pt") as file:
            yield file.get_tensor(entry.name)


def main() -> None:
    """Send one checkpoint, or many."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if sys.argv[1:] != ["--serve"]:
        send_checkpoint(sys.argv[1:])
        return
    for line in sys.stdin:
        send_checkpoint(shlex.split(line))


def send_checkpoint(words: Sequence[str]) -> None:
    """Send the checkpoint that a command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="directory of a published checkpoint")
    parser.add_argument("--address", required=True, help="of this process, as the engines reach it")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True, help="ranks of all engines, and one")
    parser.add_argument("--group", required=True, help="name of the group, never used before")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--timeout-s", type=float, default=120.0)
    given = parser.parse_args(words)
    transfer = Transfer(given.group, given.address, given.port, 0, given.world_size, given.backend)
    log.info("sent %d tensors", send(transfer, stored(given.weights), timeout_s=given.timeout_s))


if __name__ == "__main__":
    main()
