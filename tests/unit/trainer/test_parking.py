"""Parked tensors hold no memory and come back with their values, views of each other as before."""

from __future__ import annotations

import torch

from workers.trainer.parking import Parking, tensors_on

CPU = torch.device("cpu")


def test_parked_tensors_hold_no_memory_and_come_back_with_their_values() -> None:
    parking, tensor = Parking(CPU), torch.arange(1000.0)
    parking.empty([tensor])
    assert tensor.untyped_storage().nbytes() == 0
    parking.unpark()
    assert torch.equal(tensor, torch.arange(1000.0))


def test_views_of_a_flat_tensor_are_parked_once_and_stay_views() -> None:
    parking, flat = Parking(CPU), torch.arange(12.0)
    first, second = flat[:6].view(2, 3), flat[6:]
    parking.empty([first, second, flat])
    parking.unpark()
    flat.mul_(2)
    assert first.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert second.tolist() == [12, 14, 16, 18, 20, 22]


def test_a_parked_optimizer_goes_on_as_if_it_had_not_been() -> None:
    def train(parking: Parking | None) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for step in range(3):
            (weight * torch.arange(5.0)).sum().backward()  # type: ignore[no-untyped-call]
            if parking is not None and step == 1:
                parking.empty([weight, weight.grad, *(v for s in optimizer.state.values() for v in s.values())])
                parking.unpark()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach()

    assert torch.equal(train(Parking(CPU)), train(None))


def test_every_tensor_of_the_device_is_found() -> None:
    kept, hidden = torch.ones(3), {"deep": [torch.nn.Parameter(torch.ones(2))]}
    found = {id(tensor) for tensor in tensors_on(CPU)}
    assert {id(kept), id(hidden["deep"][0])} <= found
    assert not any(tensor is kept for tensor in tensors_on(torch.device("meta")))


def test_on_the_cpu_state_stays_where_it_is() -> None:
    parking, weight = Parking(CPU), torch.ones(1000)
    parking.park()
    assert weight.sum() == 1000
    parking.unpark()
    assert weight.sum() == 1000
