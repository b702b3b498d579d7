"""Write the tasks of the calculator demo: "What is 99 minus 55?", with the call and the result that are right.

python -m examples.calculator.make_tasks --out DIR        writes DIR/tasks.jsonl and DIR/held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from examples.calculator.agent import OPERATIONS

PHRASES = (("plus", "add"), ("added to", "add"), ("minus", "sub"), ("times", "mul"), ("multiplied by", "mul"))
SMALLEST, LARGEST = 2, 99


def make_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` different tasks. At most 48,020 exist."""
    rng = random.Random(f"{seed}/calculator")  # noqa: S311 (reproducible, not secret)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        phrase, tool = rng.choice(PHRASES)
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        question = f"What is {a} {phrase} {b}?"
        found[question] = {"question": question, "tool": tool, "a": a, "b": b, "answer": OPERATIONS[tool](a, b)}
    return list(found.values())


def write(out: Path, train: int, held_out: int, seed: int) -> None:
    """Write both files; no task is in both."""
    tasks = make_tasks(train + held_out, seed)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("tasks.jsonl", tasks[held_out:]), ("held_out.jsonl", tasks[:held_out])):
        (out / name).write_text("".join(json.dumps(task) + "\n" for task in part))


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.out, arguments.train, arguments.held_out, arguments.seed)


if __name__ == "__main__":
    main()
