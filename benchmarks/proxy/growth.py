"""What a session holds and what it writes while it grows: 64 turns to 100,000 tokens."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.proxy.client import drive
from benchmarks.proxy.contestants import Gateway, Ours
from benchmarks.proxy.measure import check
from benchmarks.proxy.traffic import ANSWER_TOKENS, Shape, conversations

_CONCURRENCY = 2
_FIRST_PROMPT = 3_000


@dataclass(frozen=True, slots=True)
class Growth:
    """Per session. ``bytes_per_token`` is of what is written, in the first and the second half of the turns."""

    tokens: float
    resident_mb: float
    written_mb: float
    bytes_per_token: tuple[float, float]


def shape(turns: int, tokens: int) -> Shape:
    """Turns that grow alike, from a first prompt of 3,000 tokens to ``tokens``."""
    a_turn = (tokens - _FIRST_PROMPT) // (turns - 1)
    return Shape(_FIRST_PROMPT, turns, observation_tokens=a_turn - ANSWER_TOKENS["long"])


async def grow_ours(ours: Ours, growing: Shape, sessions: int, answers: dict[str, str], seed: int) -> Growth:
    """Grow ``sessions`` of them and keep them open; a first one, which is closed, has filled the pools before."""
    for count, warming in ((1, True), (sessions, False)):
        talks = list(conversations(growing, count, answers, seed + warming))
        opened = await ours.sessions(count)
        await ours.process.at_rest()
        resident, marks = ours.process.rss(), [(0, database_bytes(ours.journal))]
        for first, end in ((0, growing.turns // 2), (growing.turns // 2, growing.turns)):
            requests = [
                [session.request(body) for body in talk.bodies(first, end)]
                for talk, session in zip(talks, opened, strict=True)
            ]
            replies, _ = await drive(ours.url, requests, _CONCURRENCY)
            check(replies, answers["long"])
            await ours.process.at_rest()
            tokens = [(await ours.control.session(session.id))["tree"] for session in opened]
            held = sum(tree["prompt_tokens"] + tree["completion_tokens"] for tree in tokens)
            marks.append((held, database_bytes(ours.journal)))
        grown = ours.process.rss() - resident
        await ours.finish(opened)
    rates = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(marks)]
    written = (marks[-1][1] - marks[0][1]) / sessions
    return Growth(marks[-1][0] / sessions, grown / sessions / 1e6, written / 1e6, (rates[0], rates[1]))


async def grow_gateway(gateway: Gateway, growing: Shape, answers: dict[str, str], seed: int) -> Growth:
    """One session of the peer that records."""
    talk = next(conversations(growing, 1, answers, seed))
    session = (await gateway.sessions(1))[0]
    resident, marks = gateway.process.rss(), [database_bytes(gateway.database)]
    for first, end in ((0, growing.turns // 2), (growing.turns // 2, growing.turns)):
        await drive(gateway.url, [[session.request(body) for body in talk.bodies(first, end)]], 1)
        await gateway.process.at_rest()
        marks.append(database_bytes(gateway.database))
    tokens = len(talk.body(growing.turns - 1)) / 4.1
    rates = [(after - before) / (tokens / 2) for before, after in pairwise(marks)]
    grown = gateway.process.rss() - resident
    return Growth(tokens, grown / 1e6, (marks[-1] - marks[0]) / 1e6, (rates[0], rates[1]))


def database_bytes(path: Path) -> int:
    """Size of an SQLite file, what lies in its write-ahead log included."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        pages = connection.execute("SELECT page_count FROM pragma_page_count").fetchone()[0]
        free = connection.execute("SELECT freelist_count FROM pragma_freelist_count").fetchone()[0]
        size = connection.execute("SELECT page_size FROM pragma_page_size").fetchone()[0]
    return int((pages - free) * size)
