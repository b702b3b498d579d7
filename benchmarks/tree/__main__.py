"""Tokens, time, memory and gradients of training a group as a tree, as one row per turn, and as one row per leaf.

    python -m benchmarks.tree                # or: make bench-tree

One Qwen3 model of 4 layers and width 256, with random weights, float32, one thread. Its output layer has the share of
the weights that it has in a model of 7 B. All three ways go through the trainer's own planning, attention and loss;
flat rows are packed to the same number of tokens per forward pass, without padding. The ways take turns, and figures
are medians of CPU-seconds of the process, so a busy machine gives the same ones. Prints a table and, last, one JSON
line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.tree.workload import VOCABULARY, Case, Group
from workers.trainer.forward import logits_of, use_trees
from workers.trainer.objective import Objective
from workers.trainer.packing import WeightedTrajectory, plan
from workflows.spec import AlgorithmSpec

CPU = torch.device("cpu")
ROW_TOKENS = 2048
CASES = (
    Case(turns=4, siblings=1, opening=128, prompt=64, answer=64),
    Case(turns=16, siblings=1, opening=96, prompt=24, answer=24),
    Case(turns=64, siblings=1, opening=64, prompt=6, answer=6),
    Case(turns=1, siblings=8, opening=768, prompt=0, answer=96),
    Case(turns=4, siblings=8, opening=384, prompt=16, answer=16),
    Case(turns=16, siblings=4, opening=96, prompt=16, answer=16, branches=True),
)


@dataclass
class Way:
    """One way of training the group."""

    rows: Sequence[WeightedTrajectory]
    merge: bool
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    """Above that of model and gradients."""
    loss: float = 0.0
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))

    def train(self, model: Any) -> None:
        """Planning, forward and backward of the whole group."""
        model.zero_grad(set_to_none=False)
        objective, self.loss = Objective(AlgorithmSpec(), 1.0), 0.0
        started = time.process_time()
        batches, self.tokens = plan(self.rows, rank=0, ranks=1, row_tokens=ROW_TOKENS, merge=self.merge)
        for batch in batches:
            loss, sums = objective(logits_of(model, batch, CPU, trees=True), batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.loss += sums.loss
        self.seconds.append(time.process_time() - started)

    def weigh(self, model: Any) -> None:
        """The same, for its memory and its gradient. Its time does not count: all memory has to be got anew."""
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the kernel counts the peak anew
        before = _memory_mb("VmRSS")
        self.train(model)
        self.peak_mb = _memory_mb("VmHWM") - before
        self.gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        self.seconds.clear()


def measure(case: Case, model: Any, repeats: int) -> dict[str, Way]:
    group = Group(case, seed=0)
    ways = {
        "tree": Way(group.leaf_rows(), merge=True),
        "turn rows": Way(group.turn_rows(), merge=False),
        "leaf rows": Way(group.leaf_rows(), merge=False),
    }
    for way in ways.values():
        way.weigh(model)
    for _ in range(repeats):
        for way in ways.values():
            way.train(model)
    return ways


def build_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.eval()
    refusal = use_trees(model, CPU)
    if refusal is not None:
        raise SystemExit(f"the model cannot be trained as a tree: {refusal}")
    return model


def figures(case: Case, ways: dict[str, Way]) -> dict[str, float]:
    tree, turns, leaves = ways["tree"], ways["turn rows"], ways["leaf rows"]
    return {
        "turns": case.turns,
        "siblings": case.siblings,
        "token_ratio": round(turns.tokens / tree.tokens, 2),
        "speedup_vs_turn_rows": round(median(turns.seconds) / median(tree.seconds), 2),
        "speedup_vs_leaf_rows": round(median(leaves.seconds) / median(tree.seconds), 2),
        "max_grad_diff": max(float((way.gradient - tree.gradient).abs().max()) for way in (turns, leaves)),
        "peak_mb": round(tree.peak_mb, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    model = build_model()
    measure(CASES[0], model, 1)  # the first pass of a process is slow
    table = Table("group", "rows", "tokens", "CPU s", "peak MB", "loss - tree's", "largest gradient difference")
    rows = []
    for case in CASES:
        ways = measure(case, model, repeats)
        rows.append(figures(case, ways))
        for name, way in ways.items():
            gap = float((way.gradient - ways["tree"].gradient).abs().max())
            scale = float(way.gradient.abs().max())
            table.add_row(
                case.name if name == "tree" else "",
                name,
                str(way.tokens),
                f"{median(way.seconds):.2f}",
                f"{way.peak_mb:.0f}",
                f"{way.loss - ways['tree'].loss:.1e}",
                f"{gap:.1e} of {scale:.1e}",
            )
    Console(width=120).print(table)
    print(json.dumps({"bench": "tree", "rows": rows}))


def _memory_mb(name: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
