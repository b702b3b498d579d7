"""What an RL agent sends: one conversation that grows, the whole history in every request.

*Later turns* are most of the traffic: turn n + 1 repeats turn n, its answer, and adds an observation. A *cold* first
turn is a prompt that nobody has sent before; a *warm* one was sent by a sibling, another sample of the same group.
Pure; the text is seeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

import orjson

from benchmarks.proxy.model import Prose

CHARACTERS_PER_TOKEN = 4.16
ANSWER_TOKENS = {"long": 130, "short": 16}
"""The engine's two answers: a stream of 130 events, and one short answer."""
OBSERVATION_TOKENS = 200
_INSTRUCTION_TOKENS = 300
_TOOL_TOKENS = 650
_LIBRARY_CHARACTERS = 2_000_000
MODEL = "policy"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{about} Returns what was written to the terminal, or an error with its exit code.",
            "parameters": {
                "type": "object",
                "properties": {
                    argument: {"type": "string", "description": f"The {argument} to use."} for argument in arguments
                },
                "required": list(arguments),
            },
        },
    }
    for name, about, arguments in (
        ("bash", "Run a command in the sandbox of the task.", ("command",)),
        ("edit", "Replace text in a file of the repository.", ("path", "old", "new")),
        ("submit", "Hand in the change and end the task.", ("summary",)),
    )
]


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session's traffic. ``openings`` are the first messages, ``observations`` follow the answers."""

    opening: tuple[bytes, ...]
    observations: tuple[bytes, ...]
    answer: str
    max_tokens: int
    stream: bool

    def body(self, turn: int) -> bytes:
        """The request of ``turn``, counted from 0."""
        said = _message("assistant", self.answer)
        later = (part for observation in self.observations[:turn] for part in (said, observation))
        messages = b",".join((*self.opening, *later))
        options = {"tools": TOOLS, "max_tokens": self.max_tokens, "temperature": 1.0, "stream": self.stream}
        head = b'{"model":"' + MODEL.encode() + b'","messages":['
        return head + messages + b"]," + orjson.dumps(options)[1:]

    def bodies(self, first: int, end: int) -> list[bytes]:
        return [self.body(turn) for turn in range(first, end)]


@dataclass(frozen=True, slots=True)
class Shape:
    """How conversations look. ``prompt_tokens`` is the first turn's prompt, about; ``group`` siblings share it."""

    prompt_tokens: int
    turns: int
    answer: str = "long"
    stream: bool = True
    observation_tokens: int = OBSERVATION_TOKENS
    group: int = 1


def conversations(shape: Shape, count: int, answers: dict[str, str], seed: int) -> Iterator[Conversation]:
    """``count`` conversations that nobody has had before, if nobody has used the seed."""
    for index in range(count):
        shared = Random(seed * 1_000_003 + index // shape.group)  # noqa: S311 - traffic of a benchmark
        own = Random(seed * 1_000_003 + 500_000 + index)  # noqa: S311
        instruction = _excerpt(shared, _INSTRUCTION_TOKENS)
        task = _excerpt(shared, shape.prompt_tokens - _INSTRUCTION_TOKENS - _TOOL_TOKENS)
        observations = (_excerpt(own, shape.observation_tokens) for _ in range(shape.turns - 1))
        yield Conversation(
            (_message("system", instruction), _message("user", task)),
            tuple(_message("user", text) for text in observations),
            answers[shape.answer],
            ANSWER_TOKENS[shape.answer],
            shape.stream,
        )


def later_turns(prompt_tokens: int, turns: int, *, answer: str = "long", stream: bool = True) -> Shape:
    """A shape whose turns from the second on have ``prompt_tokens`` on average."""
    grown = (ANSWER_TOKENS[answer] + OBSERVATION_TOKENS) * turns // 2
    return Shape(prompt_tokens - grown, turns, answer, stream)


@cache
def _library() -> str:
    return Prose(7).text(_LIBRARY_CHARACTERS)


def _excerpt(random: Random, tokens: int) -> str:
    """So many tokens, about, from a place of their own: a number makes it a text that was never sent."""
    length = int(tokens * CHARACTERS_PER_TOKEN)
    start = random.randrange(_LIBRARY_CHARACTERS - length)
    return f"{random.getrandbits(40)} " + _library()[start : start + length]


def _message(role: str, text: str) -> bytes:
    return orjson.dumps({"role": role, "content": text})
