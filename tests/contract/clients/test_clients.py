"""Real agents, unchanged: they talk, call a tool, live through weight updates and the loss of their node.

Each test ends the same way: the agent got the model's words unbroken, and every recorded token is the engine's own,
with its log-probability and the version of the weights that made it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
from client_rig import Rig

from proxy.testing import toy_ids
from workers.engines.script import Fault, Play


@dataclass(frozen=True)
class Script:
    """One conversation with an agent.

    ``scenario`` is the driver's word for it; ``cut`` is a text in what the model says, and the disturbance comes
    when its first byte is out.
    """

    scenario: str
    asks: tuple[str, ...]
    says: tuple[str, ...]
    """By the model, turn by turn."""
    hears: list[str]
    """By the person."""
    cut: str
    outcomes: tuple[str, ...] = ("root", "extend")
    prefix: str = ""
    """Start of each answer that the proxy puts into the prompt: a forced call."""
    ends: bool = True
    """Answers end with the end-of-turn token; False: with a stop string of the agent's."""

    @property
    def cut_turn(self) -> int:
        return next(turn for turn, text in enumerate(self.says) if self.cut in text)

    @property
    def cut_after(self) -> int:
        """Tokens of that turn that come before the disturbance."""
        text = self.says[self.cut_turn].removeprefix(self.prefix)
        return len(text[: text.index(self.cut)].encode()) + 1

    def ids(self) -> list[tuple[int, ...]]:
        return [toy_ids(text.removeprefix(self.prefix), end=self.ends) for text in self.says]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def bash(command: str) -> str:
    return call("bash", json.dumps({"command": command}))


def block(command: str) -> str:
    return f"Let me see.\n\n```mswea_bash_command\n{command}\n```"


ANSWERS = ("It costs 5 €.", "Then it is 15 😀.")
TALK = Script("talk", ("What does it cost?", "And with 10 more?"), ANSWERS, [*ANSWERS], cut="😀")
# A prompt of completions is text: what it repeats is merged by its tokens, not by its messages.
RAW_TALK = replace(TALK, outcomes=("root", "root"))
TOOL = Script("tool", ("2 + 40?",), (call("add", '{"a": 2, "b": 40}'), "It is 42."), ["It is 42."], cut="arguments")
# smolagents asks for a call in every turn, and tells the story of earlier ones in its own words: each turn is a branch.
FORCED = replace(
    TOOL,
    says=(TOOL.says[0], call("final_answer", '{"answer": "It is 42."}')),
    outcomes=("root", "fork"),
    prefix='<tool_call>\n{"name": "',
)
CODE = replace(
    FORCED,
    scenario="code",
    says=("Add.\n<code>\ntotal = add(2, 40)\n</code>", "Tell.\n<code>\nfinal_answer(f'It is {total}.')\n</code>"),
    cut="total",
    prefix="",
    ends=False,
)
WRITE, SUBMIT = "echo 42 > sum.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat sum.txt"
BASH = Script("tool", ("Write 2 + 40 to a file.",), ("I will.\n" + bash(WRITE), bash(SUBMIT)), ["42"], cut="sum.txt")
BLOCKS = replace(BASH, scenario="text", says=(block(WRITE), block(SUBMIT)))


def of(script: Script, *scenarios: str) -> tuple[Script, ...]:
    return tuple(replace(script, scenario=scenario) for scenario in scenarios)


@dataclass(frozen=True)
class Client:
    """A driver in an environment, and the conversations it has, one after the other in one session."""

    environment: str
    driver: str
    scripts: tuple[Script, ...]


CLIENTS = (
    Client(
        "openai",
        "openai_sdk.py",
        (
            *of(TALK, "chat_talk", "responses_talk", "chained_talk"),
            *of(RAW_TALK, "completions_talk"),
            *of(TOOL, "chat_tool", "responses_tool", "chained_tool"),
        ),
    ),
    Client("anthropic", "anthropic_sdk.py", (TALK, TOOL)),
    Client(
        "langchain",
        "langchain_agent.py",
        (
            *of(TALK, "chat_talk", "responses_talk", "anthropic_talk"),
            *of(TOOL, "chat_tool", "chat_bind", "responses_tool", "anthropic_tool"),
        ),
    ),
    Client("smolagents", "smolagents_agent.py", (TALK, FORCED, CODE)),
    Client(
        "mini-swe-agent",
        "mini_swe.py",
        (BLOCKS, *of(BASH, "tool", "responses", "anthropic"), *of(TALK, "litellm_chat", "litellm_anthropic")),
    ),
    Client(
        "openai-agents",
        "agents_sdk.py",
        (
            *of(TALK, "chat_talk", "responses_talk", "chained_talk"),
            *of(TOOL, "chat_tool", "responses_tool", "chained_tool"),
        ),
    ),
)
each_client = pytest.mark.parametrize("client", CLIENTS, ids=[client.environment for client in CLIENTS])


@dataclass(frozen=True)
class Cut:
    """Where a conversation is disturbed: after ``tokens`` tokens of turn ``turn`` of the session."""

    turn: int
    tokens: int


def cuts(client: Client) -> list[Cut]:
    starts = accumulate((len(script.says) for script in client.scripts), initial=0)
    return [Cut(start + s.cut_turn, s.cut_after) for start, s in zip(starts, client.scripts, strict=False)]


def words(client: Client) -> list[tuple[int, ...]]:
    """Ids of every turn of the session."""
    return [ids for script in client.scripts for ids in script.ids()]


async def begin(rig: Rig, client: Client) -> None:
    plan = json.dumps([[script.scenario, script.asks] for script in client.scripts])
    await rig.start(client.environment, client.driver, plan)


async def check(rig: Rig, client: Client) -> None:
    """The agent's answers are whole; the record is what the engines' own logs say."""
    assert await rig.result() == [script.hears for script in client.scripts]
    session = await rig.recorded()
    assert [turn.outcome for turn in session.turns] == [o for script in client.scripts for o in script.outcomes]
    logs = {rid: output for engine in rig.engines for rid, output in engine.outputs.items()}
    for turn, said in zip(session.turns, words(client), strict=True):
        (choice,) = turn.choices
        recording, prompt = choice.recording, list(session.prompt_ids(turn))
        outputs = [logs.pop(segment.rid) for segment in recording.segments]
        assert recording.ids == [token for output in outputs for token in output.ids] == list(said)
        assert recording.logprobs == [value for output in outputs for value in output.logprobs]
        assert recording.versions == [int(version) for output in outputs for version in output.versions]
        for segment, output in zip(recording.segments, outputs, strict=True):
            assert list(output.request.ids) == prompt + recording.ids[: segment.start]
    assert not logs, "the engines were asked for something that no turn has recorded"
    for before, turn in pairwise(session.turns):
        if turn.outcome == "extend":
            assert turn.parent == (before.index, 0)
            whole = [*session.prompt_ids(before), *before.choices[0].recording.ids]
            assert list(session.prompt_ids(turn))[: len(whole)] == whole


@each_client
async def test_a_conversation_and_a_tool_call_are_each_one_path_of_tokens(rig: Rig, client: Client) -> None:
    await begin(rig, client)
    await rig.engine(*map(Play, words(client)))
    await check(rig, client)


@each_client
async def test_weights_change_in_the_middle_of_an_answer(rig: Rig, client: Client) -> None:
    await begin(rig, client)
    stalls = {cut.turn: Fault("stall", cut.tokens) for cut in cuts(client)}
    engine = await rig.engine(*(Play(ids, fault=stalls.get(turn)) for turn, ids in enumerate(words(client))))
    for version, cut in enumerate(cuts(client), 1):
        await rig.sent(engine, cut.turn, cut.tokens)
        await rig.update_weights(engine, version)
        await engine.release()
    await check(rig, client)
    turns = (await rig.recorded()).turns
    for version, cut in enumerate(cuts(client), 1):
        runs = turns[cut.turn].choices[0].recording.version_runs()
        assert runs == [[version - 1, cut.tokens], [version, len(words(client)[cut.turn]) - cut.tokens]]


@each_client
async def test_the_node_is_taken_away_in_the_middle_of_an_answer(rig: Rig, client: Client) -> None:
    await begin(rig, client)
    rest = [Play(ids) for ids in words(client)]
    done = 0
    for version, cut in enumerate(cuts(client)):
        last = cut.turn - done
        engine = await rig.engine(*rest[:last], replace(rest[last], fault=Fault("stall", cut.tokens)), version=version)
        await rig.sent(engine, last, cut.tokens)
        await rig.route(engine, "closed", version)
        rest, done = [Play(rest[last].ids[cut.tokens :]), *rest[last + 1 :]], cut.turn
    await rig.engine(*rest, version=len(cuts(client)))
    await check(rig, client)
    turns = (await rig.recorded()).turns
    for node, cut in enumerate(cuts(client)):
        recording = turns[cut.turn].choices[0].recording
        assert [segment.node for segment in recording.segments] == [f"node-{node}", f"node-{node + 1}"]
        assert recording.version_runs() == [[node, cut.tokens], [node + 1, len(recording.ids) - cut.tokens]]
