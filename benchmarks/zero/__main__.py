"""The same training by every ZeRO stage, by one rank and two, and resumed by others than those that began it.

    python -m benchmarks.zero                # or: make compare-zero

A Qwen3 model of two layers in float32 is trained for 20 optimizer steps on trees of random tokens, with a learning rate
that rises and falls. The loss of each
step is compared with that of one rank without ZeRO's partitioning (stage 0). ``repeated`` trains the last ten steps
again from a checkpoint and says whether the weights are the same to the bit; ``ahead`` accumulates their batches in two
parts each, after one that is dropped. The peak memory of one pass is taken with and without activation checkpointing.
Prints a table and, last, one JSON line.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.tree.workload import VOCABULARY
from benchmarks.zero.legs import STEPS, Curve, Leg, run_gang
from benchmarks.zero.memory import weigh_checkpointing

STAGES = (0, 1, 2, 3)
HALF = STEPS // 2
RESUMED = {0: 3, 1: 2, 2: 1, 3: 0}
"""Stage that wrote a checkpoint, and the one that goes on from it."""


@dataclass(frozen=True)
class Row:
    ranks: int
    stage: int
    how: str
    loss_last: float
    max_loss_diff: float
    """Largest difference of a step's loss from one rank at stage 0."""
    same_weights: bool | None = None
    """Of what was trained twice from one checkpoint."""


def compare(folder: Path) -> list[Row]:
    model = build_model(folder / "model")
    saved = {ranks: [str(folder / f"saved-{ranks}-{stage}") for stage in STAGES] for ranks in (1, 2)}
    alone = [Leg(stage, save_at=HALF, save=saved[1][stage]) for stage in STAGES]
    together = [Leg(stage, save_at=HALF, save=saved[2][stage]) for stage in STAGES]
    again = [Leg(stage, first=HALF, load=saved[2][stage]) for stage in STAGES]
    ahead = [Leg(stage, first=HALF, load=saved[2][stage], ahead=True) for stage in STAGES]
    recompute = [Leg(stage, first=HALF, load=saved[2][stage], recompute=True) for stage in STAGES]
    grown = [Leg(after, first=HALF, load=saved[1][before]) for before, after in RESUMED.items()]
    shrunk = [Leg(after, first=HALF, load=saved[2][before]) for before, after in RESUMED.items()]

    curves = dict(zip(alone, run_gang(model, 1, alone, folder), strict=True))
    oracle = curves[alone[0]]
    legs = together + again + ahead + recompute + grown
    curves |= zip(legs, run_gang(model, 2, legs, folder), strict=True)
    curves |= zip(shrunk, run_gang(model, 1, shrunk, folder), strict=True)

    def row(leg: Leg, ranks: int, how: str, same: bool | None = None) -> Row:
        return Row(ranks, leg.stage, how, curves[leg].losses[-1], _gap(curves[leg], oracle), same)

    rows = [row(leg, 1, "from the start") for leg in alone]
    for leg, second in zip(together, again, strict=True):
        rows.append(row(leg, 2, "from the start", curves[leg].weights == curves[second].weights))
    rows += [row(leg, 2, "ahead") for leg in ahead]
    rows += [row(leg, 2, "activation checkpointing") for leg in recompute]
    rows += [row(leg, 2, f"resumed from 1 rank, stage {stage}") for stage, leg in zip(RESUMED, grown, strict=True)]
    rows += [row(leg, 1, f"resumed from 2 ranks, stage {stage}") for stage, leg in zip(RESUMED, shrunk, strict=True)]
    return rows


def build_model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=36,  # of matrices that two ranks cannot share without a remainder
        intermediate_size=63,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _gap(curve: Curve, oracle: Curve) -> float:
    return max(abs(a - b) for a, b in zip(reversed(curve.losses), reversed(oracle.losses), strict=False))


def main() -> None:
    table = Table("ranks", "stage", "how", "last loss", "largest difference", "repeated")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder))
    for row in rows:
        same = {None: "", True: "same weights", False: "OTHER WEIGHTS"}[row.same_weights]
        table.add_row(str(row.ranks), str(row.stage), row.how, f"{row.loss_last:.6f}", f"{row.max_loss_diff:.1e}", same)
    Console(width=120).print(table)
    peaks = weigh_checkpointing()
    print(
        f"activation checkpointing, 4 layers of width 256, 1,528 tokens: peak {peaks.peak_mb_checkpointing} MB, "
        f"not {peaks.peak_mb} MB; gradients differ by {peaks.max_grad_diff:.1e}"
    )
    print(json.dumps({"bench": "zero", "rows": [asdict(row) for row in rows], **peaks._asdict()}))


if __name__ == "__main__":
    main()
