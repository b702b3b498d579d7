"""``python -m workers.profiling --model DIR [--threads N] [--dtype float32]``: one JSON line with the node's profile.

Fits the roofline of :mod:`workflows.scheduling.roofline` to some loads, and tells how far it is off on others.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch

from workers.profiling import decode, peaks, train
from workers.profiling.result import ProfileResult, Row
from workflows.scheduling.calibration import decode_error, fit_decode, fit_train, train_error
from workflows.scheduling.devices import DEVICES, DeviceProfile
from workflows.scheduling.model_cost import ModelCost
from workflows.scheduling.roofline import Load, rates, train_priority

Loads = tuple[tuple[int, int], ...]


class Plan(NamedTuple):
    """Loads as (sequences, tokens of each); those of ``*_check`` are predicted, not fitted."""

    decode_fit: Loads = ((1, 32), (1, 256), (4, 64), (8, 32), (8, 256), (12, 96), (16, 128), (24, 64))
    decode_check: Loads = ((2, 128), (6, 96), (10, 64), (14, 128), (20, 96))
    train_fit: Loads = ((1, 32), (6, 32), (1, 256), (4, 256), (3, 128))
    train_check: Loads = ((3, 64), (4, 128), (2, 256))


SMALL = Plan()
LARGE = Plan(
    decode_fit=((1, 16), (1, 128), (4, 32), (8, 16), (8, 64), (12, 32)),
    decode_check=((2, 64), (6, 32), (10, 24)),
    train_fit=((1, 16), (3, 16), (1, 96), (2, 64)),
    train_check=((2, 32), (1, 64), (2, 48)),
)
USUAL = Load(batch=16, context=128)
"""Under which predicted rates are shown."""
LARGE_FROM = 2e7
"""Parameters from which a few minutes on a core allow for the short plan only."""


def profile(path: Path, dtype: str, threads: int) -> ProfileResult:
    """Measure, fit, and compare with loads that were not fitted."""
    model = ModelCost.from_config(json.loads((path / "config.json").read_text()), dtype)
    device = DeviceProfile(
        name="CPU",
        peak_flops=peaks.peak_flops(),
        bandwidth=peaks.bandwidth(),
        memory_bytes=peaks.memory_bytes(),
        link_bandwidth=DEVICES["CPU"].link_bandwidth,
    )
    plan = LARGE if model.parameters > LARGE_FROM else SMALL
    decoded = list(decode.measure(path, dtype, (*plan.decode_fit, *plan.decode_check)))
    trained = list(train.measure(path, dtype, threads, (*plan.train_fit, *plan.train_check)))
    device = fit_decode(device, model, decoded[: len(plan.decode_fit)])
    device = fit_train(device, model, trained[: len(plan.train_fit)])
    rows = [
        *(
            Row("decode", p.batch, p.context_tokens / p.batch, p.batch / p.seconds, decode_error(device, model, p))
            for p in decoded[len(plan.decode_fit) :]
        ),
        *(
            Row("train", round(p.tokens / p.context), p.context, p.tokens / p.seconds, train_error(device, model, p))
            for p in trained[len(plan.train_fit) :]
        ),
    ]
    usual = rates(device, model, USUAL)
    return ProfileResult(
        device=device,
        rows=tuple(rows),
        train_priority=train_priority(device, model),
        decode_tokens_s=usual.decode,
        train_tokens_s=usual.train,
    )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cores", default="", help="cores to run on, separated by commas; default: any")
    arguments = parser.parse_args()
    if arguments.cores:
        os.sched_setaffinity(0, [int(core) for core in arguments.cores.split(",")])
    torch.set_num_threads(arguments.threads)
    print(profile(arguments.model.resolve(), arguments.dtype, arguments.threads).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
