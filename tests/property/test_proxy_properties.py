"""What holds for every chunking, every cut and every conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.answering import Answering
from proxy.dialects.base import TurnRequest
from proxy.generation import Services
from proxy.meter import Counters
from proxy.routes import RouteUse
from proxy.testing import toy_ids, write_toy_model
from proxy.trajectory import replay
from proxy.trajectory.answer import AnswerBuilder
from proxy.trajectory.canonical import Message
from proxy.trajectory.policy import Policy
from proxy.trajectory.reasoning import NoReasoning
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.session import Session
from proxy.trajectory.toolcalls import parser_factory
from proxy.trajectory.tree import ROOT, Tree
from storage.errors import EngineProtocolError, EngineUnavailable
from storage.journal import JournalRecord
from storage.ledger import Route
from workers.engines.base import Chunk, Finish, Sampling, VersionSpan

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    },
)
ANSWERS = [
    "Hello, w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld \N{GRINNING FACE}!",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    'So: <tool_call>{"name": "add", "arguments": {}}</tool_call> <tool_call>{}</tool_call> END x',
    "",
]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("toy")
    return Renderer(write_toy_model(folder))


class CuttingEngine:
    """Writes ``ids`` after a prompt of ``prompt`` tokens, in given chunks, broken off where ``cuts`` say."""

    def __init__(self, ids: Sequence[int], prompt: int, chunks: list[int], cuts: list[tuple[int, str]]) -> None:
        self._ids, self._prompt, self._chunks, self._cuts = ids, prompt, chunks, list(cuts)

    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, request_id: str, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        start = at = len(ids) - self._prompt
        stop = min(len(self._ids), start + sampling.max_new_tokens)
        cut, kind = self._cuts.pop(0) if self._cuts else (stop, "")
        cut = min(start + cut, stop) if kind else stop
        turn = 0
        while at < cut:
            end = min(at + self._chunks[turn % len(self._chunks)], cut)
            turn += 1
            new = tuple(self._ids[at:end])
            yield Chunk(new, tuple(-token / 512 for token in new), 0)
            at = end
            await asyncio.sleep(0)
        if kind == "dies":
            raise EngineUnavailable("the connection broke")
        if kind == "lies":
            raise EngineProtocolError("K+N log-probs")
        if kind == "aborts":
            yield Chunk((), (), 0, finish=Finish("abort"))
            return
        finish = Finish("stop" if stop == len(self._ids) else "length")
        yield Chunk((), (), 0, (VersionSpan(0, 0, at - start),) if at > start else None, finish)

    async def abort(self, request_id: str | None) -> None:
        return None

    def continuable(self, sampling: Sampling) -> bool:
        return True


class Routes:
    """One route that is always open."""

    def __init__(self, engine: CuttingEngine) -> None:
        self._engine = engine

    async def acquire(
        self, run: str, affinity: str | None, deadline: float, what: str, *, version: int | None = None
    ) -> RouteUse:
        assert deadline > time.monotonic()
        route = Route("lease", run, "node", "http://engine", "scripted", 1, 0, "open")
        return RouteUse(run, route, self._engine, None)  # type: ignore[arg-type]

    def release(self, use: RouteUse, *, suspect: bool = False) -> None:
        return None


class MemoryJournal:
    def __init__(self) -> None:
        self.records: list[JournalRecord] = []

    async def append(self, *records: JournalRecord) -> None:
        await asyncio.sleep(0)
        self.records += records

    def entries(self) -> list[replay.Entry]:
        return [replay.Entry(r.kind, r.data, r.ids, r.logprobs) for r in self.records]


def new_session(renderer: Renderer) -> Session:
    policy = Policy(model="toy", max_context=1000, tool_parser="hermes", temperature=1.0, top_p=1.0, seed=1)
    return Session("s", "run", policy, renderer)


async def take_turn(
    session: Session,
    journal: MemoryJournal,
    request: TurnRequest,
    answer: Sequence[int],
    chunks: list[int],
    cuts: list[tuple[int, str]],
) -> Answering:
    placement = session.place(request)
    turn = session.begin(
        placement, request, session.decide(placement, request), generations=[f"g{len(session.turns)}"], created=1
    )
    opening = replay.turn_entry(session, turn, placement)
    await journal.append(JournalRecord(session.id, opening.kind, opening.data, opening.ids, opening.logprobs))
    engine = CuttingEngine(answer, turn.prompt_tokens, chunks, cuts)
    answering = Answering(Services(journal, Routes(engine), Counters()), session, turn)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        await answering.gone()
    assert answering.error is None
    return answering


def facts(session: Session) -> object:
    """Everything that must not depend on how the tokens came: tree, answers, outcomes."""
    spans = [
        (s.parent, s.kind, s.ids.tolist(), s.logprobs.tolist(), s.versions.tolist(), s.generation)
        for s in session.tree.spans
    ]
    turns = [
        (t.outcome, t.prompt_end, c.status, c.finish_reason, c.answer, c.end, c.ended) for t, c in session.generations()
    ]
    return spans, turns


def shown(answering: Answering) -> tuple[str, list[object]]:
    deltas = [event.delta for event in answering.events if event.delta]
    return "".join(d.text for d in deltas), [d.call for d in deltas if d.call]


CUTS = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["dies", "aborts", "lies"])), max_size=3)
CHUNKS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


async def converse(
    renderer: Renderer, script: list[tuple[str, int, bool]], disturb: list[tuple[list[int], list[tuple[int, str]]]]
) -> tuple[Session, MemoryJournal, list[object]]:
    session, journal = new_session(renderer), MemoryJournal()
    messages: tuple[Message, ...] = (Message("user", "hi"),)
    seen: list[object] = []
    for (text, limit, stops), (chunks, cuts) in zip(script, disturb, strict=True):
        request = TurnRequest(messages, tools=TOOLS, max_tokens=limit, stop=("END",) if stops else ())
        answering = await take_turn(session, journal, request, toy_ids(text), chunks, cuts)
        seen.append(shown(answering))
        answer = answering.turn.choices[0].answer
        assert answer is not None
        messages = (*messages, answer, Message("user", "go on"))
    return session, journal, seen


@settings(max_examples=100)
@given(
    script=st.lists(st.tuples(st.sampled_from(ANSWERS), st.integers(1, 120), st.booleans()), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_chunking_and_any_cuts_give_the_tree_and_the_answers_of_the_undisturbed_run(renderer, script, data):
    disturb = [(data.draw(CHUNKS), data.draw(CUTS)) for _ in script]
    calm, _, calm_seen = asyncio.run(converse(renderer, script, [([1000], []) for _ in script]))
    rough, journal, rough_seen = asyncio.run(converse(renderer, script, disturb))
    assert facts(rough) == facts(calm)
    assert rough_seen == calm_seen

    again = new_session(renderer)
    replay.replay(again, journal.entries())
    assert facts(again) == facts(rough)


@settings(max_examples=100)
@given(text=st.text(alphabet='ad(1,)<tool_cal>/{}":\N{GRINNING FACE} \n', max_size=60), data=st.data())
@pytest.mark.parametrize(
    "parser", [("none",), ("hermes",), ("positional", "", ""), ("positional", "<tool_call>", "</tool_call>")]
)
def test_an_answer_does_not_depend_on_how_its_tokens_were_split(renderer, parser, text, data):
    factory = parser_factory(*parser)
    stops = data.draw(st.sampled_from([(), ("l>",), ("1,", ")")]))
    ids = toy_ids(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))

    def build(edges: list[int]) -> tuple[Message, str | None, int]:
        builder = AnswerBuilder(renderer.decode, NoReasoning(), factory(TOOLS), stops=stops, silent=renderer.eos_ids)
        accepted = 0
        for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
            if builder.stop_string is None:
                accepted += builder.feed(ids[start:end])[0]
        builder.finish(ended=True)
        return builder.message(), builder.stop_string, accepted

    assert build(cuts) == build([])
    if parser == ("none",) and not stops:
        assert build(cuts)[0].content == text


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 30), st.lists(st.integers(0, 2), max_size=8), st.booleans()),
        max_size=25,
    )
)
def test_ends_stay_valid_and_side_channels_aligned_whatever_is_inserted(steps):
    tree, ends = Tree(), [(ROOT, [])]
    for number, (sampled, place, tokens, passable) in enumerate(steps):
        after, before = ends[place % len(ends)]
        ids = np.asarray(tokens, np.int32)
        if sampled:
            logprobs = np.asarray([-number - token / 4 for token in tokens], np.float32)
            versions = np.full(len(tokens), number, np.int32)
            end = tree.append_completion(after, f"g{number}", ids, logprobs, versions, passable=passable)
        else:
            end, matched = tree.insert_prompt(ids, after)
            assert matched <= len(tokens)
        ends.append((end, before + tokens))
    for end, expected in ends:
        assert tree.path_ids(end).tolist() == expected
        assert tree.depth(end) == len(expected)
    for span in tree.spans:
        assert len(span.ids) > 0
        if span.kind == "completion":
            number = int(span.generation[1:])
            assert span.versions.tolist() == [number] * len(span.ids)
            assert span.logprobs.tolist() == [-number - token / 4 for token in span.ids.tolist()]
    sampled_tokens = sum(len(tokens) for sampled, _, tokens, _ in steps if sampled)
    assert tree.tokens("completion") == sampled_tokens
