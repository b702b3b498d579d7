"""The built-in agent: send the task's messages once, hand the answer to the reward. Needs no code."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson

from workers.agents.outcome import Outcome, tail


class SingleTurn:
    """Sends ``task["messages"]``, or ``task["prompt"]`` as a user message; outputs ``{"content", "finish_reason"}``."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def run(self, job: str, payload: dict[str, Any], limit_s: float) -> Outcome:
        messages = messages_of(payload["task"])
        if messages is None:
            return Outcome("error", detail="the task has neither `messages` (a list) nor `prompt` (a text)")
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask(payload["llm"], messages)
        except TimeoutError:
            return Outcome("timeout", detail=f"no answer within {limit_s:g} s")
        except aiohttp.ClientError as error:
            return Outcome("infra", detail=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _ask(self, llm: dict[str, str], messages: list[dict[str, Any]]) -> Outcome:
        if self._http is None:
            # The deadline is the job's; a request may be held for as long as weights change.
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
        headers = {"Authorization": f"Bearer {llm['api_key']}", "Content-Type": "application/json"}
        body = orjson.dumps({"model": llm["model"], "messages": messages})
        async with self._http.post(f"{llm['base_url']}/chat/completions", data=body, headers=headers) as response:
            text = await response.text()
            if response.status >= 500:
                return Outcome("infra", detail=tail(f"HTTP {response.status}: {text}"))
            if response.status >= 400:
                return Outcome("error", detail=tail(f"HTTP {response.status}: {text}"))
        choice = orjson.loads(text)["choices"][0]
        return Outcome("ok", {"content": choice["message"]["content"], "finish_reason": choice["finish_reason"]})


def messages_of(task: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The task's request, or None if it has none."""
    if isinstance(task.get("messages"), list):
        return list(task["messages"])
    if isinstance(task.get("prompt"), str):
        return [{"role": "user", "content": task["prompt"]}]
    return None
