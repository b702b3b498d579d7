"""Agents as anybody writes them: the stock OpenAI client, no retries, streaming and not. What it was told is kept."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import openai

from proxy.client import ControlClient

BUDGETS = (60, 120, 180, 240, 300)
"""``max_tokens`` of the requests."""
LIMIT_S = 900.0


@dataclass(frozen=True)
class Told:
    """One choice of an answer, as the client's user sees it."""

    text: str
    finish: str | None
    tokens: tuple[tuple[str, float], ...] | None
    """Text and log-prob of each token; None if they were not asked for."""


@dataclass(frozen=True)
class Asked:
    """One request and what came of it."""

    session: str
    request: dict[str, Any]
    told: tuple[Told, ...] = ()
    completion_tokens: int = 0
    error: str | None = None


@dataclass
class Agents:
    """``count`` conversations of two turns at a time, until :attr:`enough`."""

    control: ControlClient
    run: str
    seed: int
    asked: list[Asked] = field(default_factory=list)
    talking: set[str] = field(default_factory=set)
    """Sessions with a request that is not answered yet."""
    heard: int = 0
    """Chunks of streams that came so far."""
    ended: list[dict[str, Any]] = field(default_factory=list)
    """Sessions that are over, as the control API shows them."""
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, count: int) -> None:
        """Returns when it is enough and every request has its answer."""
        async with plain_http() as http:
            await asyncio.gather(*(self._one_after_another(http, number) for number in range(count)))

    async def _one_after_another(self, http: Any, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        for index in itertools.count():
            if self.enough.is_set():
                return
            opened = await self.control.create_session(self.run, label=f"agent {number}, conversation {index}")
            client = openai.AsyncOpenAI(
                api_key=opened["api_key"],
                base_url=opened["base_url"],
                max_retries=0,
                timeout=LIMIT_S,
                http_client=http,
            )
            await self._converse(client, opened["session"], rng)
            self.ended.append(await self.control.session(opened["session"]))
            await self.control.finish_session(opened["session"])

    async def _converse(self, client: openai.AsyncOpenAI, session: str, rng: random.Random) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{rng.randrange(100)}+{rng.randrange(100)}"}]
        for _ in range(2):
            asked = await self.ask(client, session, request_of(messages, rng))
            if asked.error is not None:
                return
            messages += [{"role": "assistant", "content": asked.told[0].text}, {"role": "user", "content": "more"}]

    async def ask(self, client: openai.AsyncOpenAI, session: str, request: dict[str, Any]) -> Asked:
        """Send a request and keep what was told."""
        self.talking.add(session)
        try:
            answer = await client.chat.completions.create(**request)
            told, tokens = await self._streamed(answer) if request["stream"] else _whole(answer)
            asked = Asked(session, request, told, tokens)
        except openai.OpenAIError as error:
            asked = Asked(session, request, error=f"{type(error).__name__}: {error}")
        finally:
            self.talking.discard(session)
        self.asked.append(asked)
        return asked

    async def _streamed(self, answer: Any) -> tuple[tuple[Told, ...], int]:
        text: dict[int, str] = {}
        finish: dict[int, str | None] = {}
        tokens: dict[int, list[tuple[str, float]]] = {}
        count = 0
        async for chunk in answer:
            self.heard += 1
            count = chunk.usage.completion_tokens if chunk.usage is not None else count
            for choice in chunk.choices:
                text[choice.index] = text.get(choice.index, "") + (choice.delta.content or "")
                finish[choice.index] = choice.finish_reason or finish.get(choice.index)
                if choice.logprobs is not None:
                    entries = [(entry.token, entry.logprob) for entry in choice.logprobs.content or ()]
                    tokens.setdefault(choice.index, []).extend(entries)
        told = [Told(text[at], finish[at], tuple(tokens[at]) if at in tokens else None) for at in sorted(text)]
        return tuple(told), count


def plain_http() -> Any:
    """Without certificates, which take long to load; there is no TLS here."""
    return openai.DefaultAsyncHttpxClient(verify=False)


def request_of(messages: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """Every kind of request that may go on elsewhere."""
    stream = rng.random() < 0.6
    request: dict[str, Any] = {
        "model": "any",
        "messages": list(messages),
        "max_tokens": rng.choice(BUDGETS),
        "stream": stream,
        "logprobs": rng.random() < 0.5,
        "n": 2 if rng.random() < 0.1 else 1,
    }
    if stream:
        request["stream_options"] = {"include_usage": True}
    if rng.random() < 0.2:
        request["logit_bias"] = {str(rng.randrange(5, 50)): 2.0}
    return request


def _whole(answer: Any) -> tuple[tuple[Told, ...], int]:
    told = [
        Told(
            choice.message.content or "",
            choice.finish_reason,
            None if choice.logprobs is None else tuple((e.token, e.logprob) for e in choice.logprobs.content or ()),
        )
        for choice in sorted(answer.choices, key=lambda choice: choice.index)
    ]
    return tuple(told), answer.usage.completion_tokens
