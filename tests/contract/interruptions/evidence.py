"""What was told, what is in the journal and what the engines logged, held against each other. Reads files only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from proxy.sessions import restore
from proxy.status import session_view
from proxy.trajectory.recording import Segment
from proxy.trajectory.renderer import Renderer
from proxy.trajectory.session import Session
from proxy.trajectory.tree import UNKNOWN_VERSION
from proxy.trajectory.turn import Choice, Turn
from storage.journal import open_journal
from storage.ledger import Ledger
from tests.contract.engines.models import logprobs
from tests.contract.interruptions.agents import Asked, Told
from tests.contract.interruptions.cluster import Cluster
from tests.contract.interruptions.events import Kind, interruptions
from tests.contract.interruptions.model import END, text, token_text

NEAR = 1e-3
"""Largest difference of two float32 computations of one log-prob, with a cut in between."""


@dataclass
class Logged:
    """One request in an engine's own log."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class Findings:
    """What the evidence comes to."""

    generations: int = 0
    interrupted: int = 0
    by: Counter[Kind] = field(default_factory=Counter)
    """Generations that an event of the kind interrupted at least once; ``other``: none of ours."""
    tokens: int = 0
    unknown: int = 0
    """Tokens without version evidence: their engine died before it gave any."""
    undelivered: int | None = None
    """Tokens that engines logged and nobody received; None: they keep no log."""
    recomputed: int = 0
    """Tokens whose log-prob is that of a plain forward pass of the weights they are said to be of."""
    faults: list[str] = field(default_factory=list)


def weigh(cluster: Cluster, asked: Sequence[Asked]) -> Findings:
    """Check every answered request against journal, engine logs and weights."""
    logs = read_logs([node.token_log() for node in cluster.nodes.values()])
    findings = Findings(undelivered=0 if logs else None)
    config = cluster.state.cluster()
    journal, ledger = open_journal(config.journal_url, config.durability), Ledger(config.ledger_url)
    renderer, sessions = Renderer(cluster.spec.model.path), dict[str, Session]()
    turns: Counter[str] = Counter()
    try:
        for one in asked:
            if one.error is not None:
                continue
            if one.session not in sessions:
                sessions[one.session] = restore(journal, ledger.session(one.session), renderer)
            session = sessions[one.session]
            turn = session.turns[turns[one.session]]
            turns[one.session] += 1
            total = sum(len(choice.recording.ids) for choice in turn.choices)
            if one.completion_tokens != total:
                findings.faults.append(f"{one.session}: told {one.completion_tokens} tokens, {total} are recorded")
            views = session_view(session)["turns"][turn.index]["choices"]
            for choice, view, told in zip(turn.choices, views, one.told, strict=True):
                _Trial(cluster, findings, logs, one, session, turn, choice, view, told).run()
    finally:
        journal.close()
        ledger.close()
    return findings


def read_logs(paths: Sequence[Path]) -> dict[str, Logged]:
    """By request id; the line that a killed engine was writing is left out."""
    logs: dict[str, Logged] = {}
    for path in paths:
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if "input_ids" in record:
                logs[record["rid"]] = Logged(record["input_ids"])
            elif "ids" in record:
                entry = logs[record["rid"]]
                entry.ids += record["ids"]
                entry.logprobs += record["logprobs"]
                entry.versions += [int(record["version"])] * len(record["ids"])
    return logs


@dataclass
class _Trial:
    """One generation."""

    cluster: Cluster
    findings: Findings
    logs: Mapping[str, Logged]
    asked: Asked
    session: Session
    turn: Turn
    choice: Choice
    view: Mapping[str, Any]
    told: Told

    def run(self) -> None:
        recording, findings = self.choice.recording, self.findings
        findings.generations += 1
        findings.tokens += len(recording.ids)
        findings.unknown += recording.versions.count(UNKNOWN_VERSION)
        kinds = interruptions(self.cluster, self.view)
        findings.interrupted += bool(kinds)
        findings.by.update(kinds)
        checks: list[Callable[[], Iterator[str]]] = [self._whole, self._delivered, self._as_logged, self._as_computed]
        findings.faults += [f"{self.choice.generation}: {fault}" for check in checks for fault in check()]

    def _whole(self) -> Iterator[str]:
        """One unbroken row of tokens within the budget, each with its log-prob and version."""
        recording, budget = self.choice.recording, self.asked.request["max_tokens"]
        count = len(recording.ids)
        if (self.choice.status, self.choice.fault, recording.conflicts) != ("finished", "", 0):
            yield f"status {self.choice.status}, fault {self.choice.fault!r}, {recording.conflicts} conflicts"
        if not count == len(recording.logprobs) == len(recording.versions):
            yield f"{count} tokens, {len(recording.logprobs)} log-probs, {len(recording.versions)} versions"
        edges = [0, *(edge for segment in recording.segments for edge in (segment.start, segment.end)), count]
        if any(left != right for left, right in list(pairwise(edges))[::2]):
            yield f"segments do not join: {edges}"
        ended = bool(count) and recording.ids[-1] == END
        if END in recording.ids[:-1] or count > budget or (not ended and count != budget):
            yield f"{count} tokens of {budget}, ended: {ended}"

    def _delivered(self) -> Iterator[str]:
        """The agent was told exactly the recorded tokens, each once, and why they end."""
        recording = self.choice.recording
        if self.told.text != text(recording.ids):
            yield f"told {self.told.text!r}, recorded {text(recording.ids)!r}"
        if self.told.finish != ("stop" if recording.ids[-1] == END else "length"):
            yield f"told finish_reason {self.told.finish}"
        expected = [
            (token_text(token), value)
            for token, value in zip(recording.ids, recording.logprobs, strict=True)
            if token != END
        ]
        if self.told.tokens is not None and not _same(self.told.tokens, expected):
            yield f"told other tokens or log-probs than recorded, or another number: {len(self.told.tokens)}"

    def _as_logged(self) -> Iterator[str]:
        """Every segment is the beginning of what its engine logged, and was asked for behind all tokens before it."""
        if not self.logs:
            return
        recording, prompt = self.choice.recording, self.session.prompt_ids(self.turn).tolist()
        for segment in recording.segments:
            part = slice(segment.start, segment.end)
            logged, count = self.logs.get(segment.rid), segment.end - segment.start
            if logged is None:  # it was cut before the engine admitted it
                if count:
                    yield f"segment {segment.number} has {count} tokens of which the engines know nothing"
                continue
            self.findings.undelivered = (self.findings.undelivered or 0) + len(logged.ids) - count
            if logged.prompt != prompt + recording.ids[: segment.start]:
                yield f"segment {segment.number} was asked for behind another prompt"
            if logged.ids[:count] != recording.ids[part]:
                yield f"segment {segment.number} has other ids than the engine logged"
            if _float32(logged.logprobs[:count]) != _float32(recording.logprobs[part]):
                yield f"segment {segment.number} has other log-probs than the engine logged"
            pairs = zip(recording.versions[part], logged.versions, strict=False)
            if any(known not in (UNKNOWN_VERSION, made) for known, made in pairs):
                yield f"segment {segment.number} has other versions than the engine logged"

    def _as_computed(self) -> Iterator[str]:
        """Log-probs are those of the weights, wherever all KV was theirs: everywhere but behind an update in place."""
        recording, prompt = self.choice.recording, self.session.prompt_ids(self.turn).tolist()
        bias = {int(token): change for token, change in self.asked.request.get("logit_bias", {}).items()}
        tokens = {position: version for segment in recording.segments for position, version in self._pure(segment)}
        for parity in {version % 2 for version in tokens.values()}:
            own = [position for position, version in tokens.items() if version % 2 == parity]
            computed = logprobs(self.cluster.models[parity], prompt, recording.ids, bias=bias)
            wrong = [position for position in own if abs(computed[position] - recording.logprobs[position]) > NEAR]
            self.findings.recomputed += len(own) - len(wrong)
            if wrong:
                at = wrong[0]
                yield (
                    f"{len(wrong)} of {len(own)} log-probs are not those of a forward pass, the first at {at} of "
                    f"{len(recording.ids)}: {recording.logprobs[at]:.4f}, computed {computed[at]:.4f}"
                )

    def _pure(self, segment: Segment) -> Iterator[tuple[int, int]]:
        """(position, version) of the segment's tokens whose whole KV is of their own version."""
        known, pure = segment.version, True
        for position in range(segment.start, segment.end):
            version = self.choice.recording.versions[position]
            if version == UNKNOWN_VERSION:
                continue
            for taken in range(known + 1, version + 1):
                pure = self.cluster.modes[taken] == "retract"
            known = version
            if pure:
                yield position, version


def _same(told: Sequence[tuple[str, float]], recorded: Sequence[tuple[str, float]]) -> bool:
    if [name for name, _ in told] != [name for name, _ in recorded]:
        return False
    return np.allclose([value for _, value in told], [value for _, value in recorded], atol=1e-6, rtol=0)


def _float32(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.asarray(values, np.float32)]
