"""Agents that stream one long answer after another, with the stock OpenAI client and no retries."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import openai

from benchmarks.sync.measure import Answer
from examples.models.tiny import END, MARKERS
from proxy.client import ControlClient

LIMIT_S = 300.0


@dataclass
class Agents:
    """``count`` agents on one run of a proxy until :meth:`stop`; ``answers`` by session."""

    url: str
    control: ControlClient
    run: str
    count: int
    tokens: int
    answers: dict[str, Answer] = field(default_factory=dict)
    _stopping: bool = False

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._live(number)) for number in range(self.count)]

    async def stop(self) -> None:
        """Each ends its answer; raises what no agent should see."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def arrived(self) -> int:
        """Tokens that agents have so far."""
        return sum(len(answer.times) for answer in self.answers.values())

    async def _live(self, number: int) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
        ) as client:
            while not self._stopping:
                session = await self.control.create_session(self.run)
                answer = self.answers[session["session"]] = Answer(self.tokens, time.perf_counter())
                try:
                    await self._ask(client.with_options(api_key=session["api_key"]), number, answer)
                except openai.OpenAIError as error:
                    answer.error = repr(error)[:300]
                    await asyncio.sleep(0.2)

    async def _ask(self, client: openai.AsyncOpenAI, number: int, answer: Answer) -> None:
        options: dict[str, Any] = {
            "model": "policy",
            "messages": [{"role": "user", "content": f"{number}+{number}"}],
            "max_tokens": self.tokens,
            "logit_bias": {str(MARKERS.index(END)): -100},
            "logprobs": True,
        }
        async for event in await client.chat.completions.create(**options, stream=True):
            now = time.perf_counter()
            for choice in event.choices:
                entries = choice.logprobs.content if choice.logprobs is not None else None
                answer.logprobs += [entry.logprob for entry in entries or ()]
                answer.times += [now] * len(entries or ())
                if choice.finish_reason not in (None, "length"):
                    answer.error = f"the answer ended with {choice.finish_reason}"
