"""Any chunking, interleaving, abort position, retry order and number of choices give the undisturbed run's tree and
answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.answering import Answering
from proxy.dialects.base import TurnRequest
from proxy.generation import Services
from proxy.live_session import LiveSession
from proxy.meter import Counters
from proxy.routes import RouteUse
from proxy.testing import toy_ids, write_toy_model
from proxy.trajectory import conversations, replay
from proxy.trajectory.canonical import Message
from proxy.trajectory.policy import Policy, choice_seed, segment_seed
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.session import Session
from proxy.trajectory.turn import Choice, Turn
from storage.errors import EngineProtocolError, EngineUnavailable
from storage.journal import JournalRecord
from storage.ledger import Route, SessionRecord
from workers.engines.base import Chunk, Finish, Sampling, VersionSpan

TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)
TEXTS = [
    "Hello, w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld \N{GRINNING FACE}!",
    'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> END x',
    "<think>\nHm.\n</think>\n\nyes",
    "",
]
_SEGMENTS = 20
"""More than a generation of these tests can have."""


@dataclass(frozen=True)
class Step:
    """One turn of a conversation; the agent goes on from choice ``taken``."""

    texts: tuple[str, ...]
    limit: int
    stop: bool
    single: bool
    taken: int


@dataclass
class Trouble:
    """What happens to one turn: how its tokens come, where its engine fails, what its client does."""

    chunks: list[int] = field(default_factory=lambda: [1000])
    cuts: list[tuple[int, str]] = field(default_factory=list)
    client: list[tuple[str, int]] = field(default_factory=list)
    """``leave`` and come back, or come ``twice``, once so many tokens are recorded; come ``again`` if all is over."""


class Engine:
    """Writes what the script says for the choice that asks, which it knows by the seed."""

    def __init__(self) -> None:
        self.session: Session
        self.answers: dict[int, list[tuple[int, ...]]] = {}
        """By turn, of each choice."""
        self.troubles: dict[int, Trouble] = {}
        self._aborted: set[str | None] = set()
        self._turns: list[Turn] = []
        self._seeds: dict[int | None, tuple[Turn, Choice]] = {}

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        turn, choice = self._asked(sampling.seed)
        answer, trouble = self.answers[turn.index][choice.index], self.troubles[turn.index]
        start = at = len(ids) - turn.prompt_tokens
        assert tuple(ids[turn.prompt_tokens :]) == answer[:start]
        stop = min(len(answer), start + sampling.max_new_tokens)
        cut, kind = trouble.cuts.pop(0) if trouble.cuts else (stop, "")
        cut = min(start + cut, stop) if kind else stop
        for size in _forever(trouble.chunks):
            await asyncio.sleep(0)
            if at == cut or request_id in self._aborted:
                break
            new = answer[at : min(at + size, cut)]
            at += len(new)
            yield Chunk(new, tuple(-token / 512 for token in new), 0)
        if request_id in self._aborted or kind == "aborts":
            yield Chunk((), (), 0, finish=Finish("abort"))
        elif kind == "dies":
            raise EngineUnavailable("the connection broke")
        elif kind == "lies":
            raise EngineProtocolError("K+N log-probs")
        else:
            spans = (VersionSpan(0, 0, at - start),) if at > start else None
            yield Chunk((), (), 0, spans, Finish("stop" if stop == len(answer) else "length"))

    async def abort(self, request_id: str | None) -> None:
        self._aborted.add(request_id)

    def continuable(self, sampling: Sampling) -> bool:
        return True

    def _asked(self, seed: int | None) -> tuple[Turn, Choice]:
        for turn in self.session.turns[len(self._turns) :]:
            self._turns.append(turn)
            for choice in turn.choices:
                first = choice_seed(turn.used.seed, choice.index)
                self._seeds |= {segment_seed(first, number): (turn, choice) for number in range(_SEGMENTS)}
        return self._seeds[seed]

    async def acquire(
        self, run: str, affinity: str | None, deadline: float, what: str, *, version: int | None = None
    ) -> RouteUse:
        """As a table with one route that is always open."""
        assert deadline > time.monotonic()
        route = Route("lease", run, "node", "http://engine", "scripted", 1, 0, "open")
        return RouteUse(run, route, self, None)  # type: ignore[arg-type]

    def release(self, use: RouteUse, *, suspect: bool = False) -> None:
        return None


class MemoryJournal:
    def __init__(self) -> None:
        self.records: list[JournalRecord] = []

    async def append(self, *records: JournalRecord) -> None:
        await asyncio.sleep(0)
        self.records += records


class World:
    """One session, its agents' conversations, and everything they were told."""

    def __init__(self, renderer: Renderer) -> None:
        policy = Policy("toy", 2000, tool_parser="hermes", reasoning_parser="think", seed=1)
        self._renderer, self._policy = renderer, policy
        self.engine, self.journal = Engine(), MemoryJournal()
        self.session = self.engine.session = Session("s", "run", policy, renderer)
        services = Services(self.journal, self.engine, Counters())  # type: ignore[arg-type]
        self._live = LiveSession(services, SessionRecord("s", "hash", "run", None, 0), self.session)
        self.turns: dict[tuple[str, int], int] = {}
        self.told: dict[tuple[str, int], object] = {}

    async def converse(self, name: str, script: Sequence[Step], troubles: Sequence[Trouble]) -> None:
        messages: tuple[Message, ...] = (Message("user", name),)
        for at, (step, trouble) in enumerate(zip(script, troubles, strict=True)):
            request = TurnRequest(
                messages,
                tools=TOOLS,
                max_tokens=step.limit,
                stop=("END",) if step.stop else (),
                parallel_tool_calls=not step.single,
                n=len(step.texts),
            )
            answering = await self._ask(f"{name}{at}", request, step, trouble)
            self.turns[name, at] = answering.turn.index
            self.told[name, at] = shown(answering)
            answer = answering.turn.choices[step.taken % len(step.texts)].answer
            assert answer is not None
            messages = (*messages, answer, Message("user", "go on"))

    async def _ask(self, body: str, request: TurnRequest, step: Step, trouble: Trouble) -> Answering:
        async def ask(*, retried: bool) -> Answering:
            return await self._live.request(request, body.encode(), retried=retried, idempotency_key="")

        answering = await ask(retried=False)
        # No generation has begun: the loop has not turned since the turn was made.
        self.engine.answers[answering.turn.index] = [toy_ids(text) for text in step.texts]
        self.engine.troubles[answering.turn.index] = trouble
        for action, tokens in trouble.client:
            while not answering.done and recorded(answering.turn) < tokens:  # noqa: ASYNC110  # each token counts
                await asyncio.sleep(0)
            second = await ask(retried=True) if action == "twice" else None
            await self._live.part(answering, told=action == "again" and answering.done)
            answering = second or await ask(retried=True)
        while not answering.done:
            await answering.news(len(answering.events))
        await self._live.part(answering, told=True)
        await answering.gone()
        assert answering.error is None
        return answering

    def facts(self, session: Session | None = None) -> dict[Any, Any]:
        """Everything that must not depend on what happened on the way; turns by conversation and step."""
        session = session or self.session
        names = {index: name for name, index in self.turns.items()}
        trainable = session.trainable()
        return {
            (*names[turn.index], choice.index): (
                turn.outcome,
                turn.parent and (names[turn.parent[0]], turn.parent[1]),
                session.prompt_ids(turn).tolist(),
                choice.recording.ids,
                choice.recording.logprobs,
                choice.recording.versions,
                session.tree.path_ids(choice.end).tolist(),
                choice.status,
                choice.finish_reason,
                choice.stop_string,
                choice.answer,
                choice.generation in trainable,
            )
            for turn, choice in session.generations()
        }

    def spans(self, session: Session | None = None) -> list[Any]:
        """The tree, without the order in which it grew."""
        session = session or self.session
        names = {choice.generation: (turn.prompt_tokens, choice.index) for turn, choice in session.generations()}
        tree = session.tree
        return sorted(
            (tree.path_ids(index).tolist(), len(span.ids), span.kind, names.get(span.generation))
            for index, span in enumerate(tree.spans)
        )

    def replayed(self) -> Session:
        """The session as its journal describes it."""
        again = Session("s", "run", self._policy, self._renderer)
        replay.replay(again, [replay.Entry(r.kind, r.data, r.ids, r.logprobs) for r in self.journal.records])
        return again


def _forever(values: Sequence[int]) -> Iterator[int]:
    while True:
        yield from values


def recorded(turn: Turn) -> int:
    return sum(len(choice.recording.ids) for choice in turn.choices)


def shown(answering: Answering) -> object:
    """What readers were told of each choice."""
    told = []
    for choice in answering.turn.choices:
        deltas = [event.delta for event in answering.events if event.choice == choice.index and event.delta]
        calls = [delta.call for delta in deltas if delta.call]
        told.append(("".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls))
    return told


STEPS = st.builds(
    Step,
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3).map(tuple),
    limit=st.integers(1, 90),
    stop=st.booleans(),
    single=st.booleans(),
    taken=st.integers(0, 2),
)
TROUBLES = st.builds(
    Trouble,
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["dies", "aborts", "lies"])), max_size=3),
    client=st.lists(st.tuples(st.sampled_from(["leave", "twice", "again"]), st.integers(0, 60)), max_size=4),
)
SCRIPTS = st.lists(STEPS, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("toy")
    return Renderer(write_toy_model(folder))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that failed goes on without a pause; what a test changes is put back."""
    monkeypatch.setattr(conversations, "_RECENT", conversations._RECENT)
    monkeypatch.setattr("proxy.generation._PAUSES_S", (0.0,))


@pytest.mark.parametrize("recent", [4, 0], ids=["word by word", "by digest"])
@settings(max_examples=40)
@given(first=SCRIPTS, second=SCRIPTS, data=st.data())
def test_nothing_that_happens_on_the_way_shows_in_the_tree_or_in_what_agents_were_told(
    renderer: Renderer, recent: int, first: list[Step], second: list[Step], data: st.DataObject
) -> None:
    """``recent``: how many turns are compared with a request before it is looked up."""
    conversations._RECENT = recent
    scripts = {"A": first, "B": second}
    troubles = {name: [data.draw(TROUBLES) for _ in script] for name, script in scripts.items()}

    async def calm() -> World:
        world = World(renderer)
        for name, script in scripts.items():
            await world.converse(name, script, [Trouble() for _ in script])
        return world

    async def rough() -> World:
        world = World(renderer)
        copies = {name: [replace(trouble, cuts=list(trouble.cuts)) for trouble in troubles[name]] for name in scripts}
        async with asyncio.timeout(30):
            await asyncio.gather(*(world.converse(name, script, copies[name]) for name, script in scripts.items()))
        return world

    expected, found = asyncio.run(calm()), asyncio.run(rough())
    assert found.facts() == expected.facts()
    assert found.told == expected.told
    assert found.spans() == expected.spans()
    again = found.replayed()
    assert found.facts(again) == found.facts()
    assert found.spans(again) == found.spans()
