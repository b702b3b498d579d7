"""Gives a device's memory to another role between updates: what a rank holds there waits in main memory."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading

import torch
from torch import Tensor


class Parking:
    """All tensors of this process on one device: weights, gradients, optimizer state, buckets, of every model.

    Storages are emptied, not tensors: DeepSpeed's tensors are views of flat ones, and stay views of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []

    def park(self) -> None:
        """On a CPU there is no other memory: only what the last step has freed goes back to the system, beside what
        follows, since nobody needs it to have gone. To look through all that the libraries hold as well would take a
        fifth of a second of every change of role."""
        if self._device.type == "cpu":
            gc.collect(1)
            threading.Thread(target=_trim, name="trim", daemon=True).start()
            return
        gc.collect()
        self.empty(tensors_on(self._device))
        torch.cuda.empty_cache()

    def empty(self, tensors: list[Tensor]) -> None:
        """Copy their storages, each once, to main memory, and free them."""
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        for storage in storages.values():
            size = storage.nbytes()
            if size:
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                copy.untyped_storage().copy_(storage, non_blocking=False)
                self._parked.append((storage, copy))
                storage.resize_(0)

    def unpark(self) -> None:
        """Every tensor has its values again."""
        for storage, copy in self._parked:
            storage.resize_(copy.nbytes)
            storage.copy_(copy.untyped_storage(), non_blocking=False)
        self._parked.clear()


def tensors_on(device: torch.device) -> list[Tensor]:
    """Those that Python knows; a type is asked for, not an instance: some modules answer that by importing things."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return [tensor for tensor in found if tensor.device == device]


def _trim() -> None:
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
