"""The live bench's agent and reward: turns of given lengths with given pauses, so that all pipelines have one workload.

The lengths have a long tail, the pauses are an agent's tools, and the reward is noise: nothing is learned here.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

MAX_TOKENS = 560
"""Longest answer; the model's context holds two of them and the questions."""


@dataclass(frozen=True)
class LiveTask:
    """One line of the bench's tasks. ``tokens`` and ``pauses_s`` are by turn; a sample varies both by its own noise."""

    prompt: str
    tokens: tuple[int, ...]
    pauses_s: tuple[float, ...]


def make_tasks(
    count: int, seed: int, *, median_tokens: float, sigma: float, median_pause_s: float
) -> Iterator[LiveTask]:
    """Lognormal lengths (a third of the tasks takes two turns) and lognormal pauses, bounded."""
    rng = random.Random(f"{seed}/live")  # noqa: S311 (a reproducible workload, not a secret)
    for number in range(count):
        turns = 2 if rng.random() < 1 / 3 else 1
        tokens = tuple(min(MAX_TOKENS, 8 + int(median_tokens * rng.lognormvariate(0, sigma))) for _ in range(turns))
        pauses = tuple(min(4.0, median_pause_s * rng.lognormvariate(0, 1)) for _ in range(turns))
        yield LiveTask(f"task {number}?", tokens, pauses)


def write_tasks(path: Path, tasks: Iterator[LiveTask]) -> None:
    """As JSON lines."""
    path.write_text("".join(json.dumps(asdict(task)) + "\n" for task in tasks))


@functools.cache
def connections() -> aiohttp.ClientSession:
    """Shared by the sessions of a process, and of the plainest client: a richer one costs more of a core than a
    session's tokens do."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0))


async def run(task: dict[str, Any], llm: Any) -> str:
    """Ask, wait as a tool would make one wait, and ask again."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    for tokens, pause_s in zip(task["tokens"], task["pauses_s"], strict=True):
        body = {"model": llm.model, "messages": messages, "max_tokens": tokens}
        async with connections().post(f"{llm.base_url}/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            answer = await response.json()
        await asyncio.sleep(pause_s)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "go on"})
    return str(messages[-2]["content"])


def noise(rollout: Any) -> float:
    """A number between 0 and 1 that follows from the answer: groups differ, and nothing can be learned."""
    digest = hashlib.sha256(str(rollout.output).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
