"""Agents during a weight update: some are in the middle of an answer, most arrive while everything is held."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import openai

from benchmarks.proxy.client import call
from benchmarks.proxy.contestants import Ours, Session
from benchmarks.proxy.traffic import ANSWER_TOKENS, MODEL

_STEP_MS = 20.0


@dataclass(frozen=True, slots=True)
class Held:
    """``duplicates``: generations that the engine finished beyond one a request. ``tokens_again``: computed twice.

    ``unproved``: sampled tokens whose weight version the proxy could not prove.
    """

    requests: int
    errors: int
    duplicates: int
    tokens_again: int
    unproved: int
    first_error: str = ""


async def hold(ours: Ours, engine: str, answer: str, *, requests: int, seconds: float) -> Held:
    """Hold new starts, pause, load, open: a weight update. Stock OpenAI clients, no retries; run it last."""
    sessions = await ours.sessions(requests)
    await call(engine, "/bench", {"answer": "long", "step_ms": _STEP_MS})
    client = openai.AsyncOpenAI(base_url=f"{ours.url}/v1", api_key="none", max_retries=0, timeout=seconds + 120)
    early, late = sessions[: requests // 3], sessions[requests // 3 :]
    tasks = [asyncio.create_task(_ask(client, session, index)) for index, session in enumerate(early)]
    await asyncio.sleep(ANSWER_TOKENS["long"] * _STEP_MS / 2000)
    await ours.route("held", 0)
    await call(engine, "/pause_generation", {"mode": "in_place"})
    for index, session in enumerate(late):
        tasks.append(asyncio.create_task(_ask(client, session, index)))
        await asyncio.sleep(0.6 * seconds / len(late))
    await asyncio.sleep(0.4 * seconds)
    await call(engine, "/update_weights_from_disk", {"model_path": "next", "weight_version": "1"})
    await call(engine, "/continue_generation", {})
    await ours.route("open", 1)
    texts = await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    log = (await call(engine, "/bench")).json()
    runs = [run for session in sessions for run in await _versions(ours, session)]
    unproved = sum(count for version, count in runs if version < 0)
    return judge(texts, answer, log["finished"], log["tokens"], unproved)


def judge(texts: Sequence[str | BaseException], answer: str, finished: int, tokens: int, unproved: int) -> Held:
    """Compare what the agents got with what the engine says it made."""
    wrong = [text for text in texts if text != answer]
    needed = len(texts) * ANSWER_TOKENS["long"]
    shown = "" if not wrong else repr(wrong[0])[:300]
    return Held(len(texts), len(wrong), max(0, finished - len(texts)), max(0, tokens - needed), unproved, shown)


async def _versions(ours: Ours, session: Session) -> list[list[int]]:
    turns = (await ours.control.session(session.id))["turns"]
    return [run for turn in turns for run in turn["versions"]]


async def _ask(client: openai.AsyncOpenAI, session: Session, index: int) -> str:
    """One answer; every second one is streamed."""
    chat = client.with_options(api_key=session.key).chat.completions
    message = {"role": "user", "content": f"task {index} of {session.id}"}
    options = {"model": MODEL, "messages": [message], "max_tokens": ANSWER_TOKENS["long"]}
    if index % 2:
        whole = await chat.create(**options)  # type: ignore[call-overload]
        return str(whole.choices[0].message.content)
    parts = []
    async for event in await chat.create(**options, stream=True):  # type: ignore[call-overload]
        parts += [choice.delta.content or "" for choice in event.choices]
    return "".join(parts)
