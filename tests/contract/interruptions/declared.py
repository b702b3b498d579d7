"""Sampling that depends on the output so far cannot go on from a cut: what engines and proxy declare then, they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.contract.interruptions.agents import LIMIT_S, Agents, Asked, plain_http
from tests.contract.interruptions.cluster import RUN, Cluster
from tests.contract.interruptions.model import END
from workers.engines.base import FEATURES

NUMBER = {"type": "json_schema", "json_schema": {"name": "number", "schema": {"type": "integer"}}}
BOUND: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5},
    "grammar": {"response_format": NUMBER},
}
TOKENS = 200
FIRST = 10
"""Tokens before the event."""


@dataclass
class Declared:
    """Names of what was seen to be kept, and what was not."""

    kept: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def note(self, name: str, fault: str) -> None:
        if fault:
            self.faults.append(f"{name}: {fault}")
        else:
            self.kept.append(name)


async def declared(cluster: Cluster) -> Declared:
    """Ask for each such feature and see it refused, or kept in place and given up when it is cut."""
    found, features = Declared(), FEATURES[cluster.spec.engine.kind]
    for feature, asked in BOUND.items():
        if feature not in features:
            found.note(f"{feature}_refused", await _refused(cluster, asked))
    if "penalties" in features:
        found.note("penalties_kept_in_place", await _in_place(cluster))
        found.note("penalties_void_when_cut", await _cut(cluster))
    return found


async def _refused(cluster: Cluster, asked: dict[str, Any]) -> str:
    answer, _ = await _ask(cluster, asked, _nothing)
    return "" if answer.error is not None and "not supported by this run's engine" in answer.error else f"{answer}"


async def _in_place(cluster: Cluster) -> str:
    async def update(_: str) -> None:
        await cluster.update("in_place")

    answer, choice = await _ask(cluster, BOUND["penalties"], update)
    versions = [version for version, _ in choice["versions"]]
    whole = answer.error is None and choice["completion_tokens"] == TOKENS and len(choice["segments"]) == 1
    return "" if whole and versions == sorted(set(versions)) and len(versions) == 2 else f"{answer}, {choice}"


async def _cut(cluster: Cluster) -> str:
    async def preempt(name: str) -> None:
        await cluster.nodes[name].preempt()
        await cluster.nodes[name].give_back()

    answer, choice = await _ask(cluster, BOUND["penalties"], preempt)
    told = answer.error is not None and "cannot go on" in answer.error
    return "" if told and choice["status"] == "failed" and len(choice["segments"]) == 1 else f"{answer}, {choice}"


async def _ask(
    cluster: Cluster, asked: dict[str, Any], event: Callable[[str], Awaitable[None]]
) -> tuple[Asked, dict[str, Any]]:
    """A request that never ends its turn; ``event`` gets the node that answers it. Returns the choice too, if any."""
    agents = Agents(cluster.control, RUN, 0)
    opened = await cluster.control.create_session(RUN)
    body = {"model": "any", "messages": [{"role": "user", "content": "1+1"}], "max_tokens": TOKENS, "stream": False}
    async with plain_http() as http:
        client = openai.AsyncOpenAI(
            api_key=opened["api_key"],
            base_url=opened["base_url"],
            max_retries=0,
            timeout=LIMIT_S,
            http_client=http,
        )
        bias = {} if event is _nothing else {"logit_bias": {str(END): -100.0}}
        asking = asyncio.create_task(agents.ask(client, opened["session"], {**body, **bias, **asked}))
        async with asyncio.timeout(LIMIT_S):
            while not asking.done():
                choice = await _choice(cluster, opened["session"])
                if choice and choice["completion_tokens"] >= FIRST:
                    await event(choice["segments"][-1]["node"])
                    break
                await asyncio.sleep(0.02)
            return await asking, await _choice(cluster, opened["session"])


async def _choice(cluster: Cluster, session: str) -> dict[str, Any]:
    turns = (await cluster.control.session(session))["turns"]
    return dict(turns[0]["choices"][0]) if turns else {}


async def _nothing(_: str) -> None:
    """No event."""
