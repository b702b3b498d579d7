"""What agents and rewards see of SeamlessFlow: two small records, and no base class.

An agent is any ``async def run(task, llm, **options)`` (or a plain function, which gets a thread); what it returns is
handed to the reward, and must be JSON. A reward is any ``def reward(rollout) -> float | None``, async or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Llm:
    """The model behind the proxy, for any OpenAI client. The key is good for this session only.

    *Example*: ``AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)``.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str


@dataclass(frozen=True)
class Rollout:
    """One finished session, as its reward sees it.

    ``turns`` holds one ``{"request": {"messages": [...]}, "response": {"message": {...}}}`` per request of the agent,
    in order; ``output`` is what the agent returned.
    """

    task: dict[str, Any]
    output: Any
    turns: list[dict[str, Any]]
