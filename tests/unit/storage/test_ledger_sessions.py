"""Routes and sessions, which outlive the proxy; metrics, intervals and human commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, FencedError, NotFoundError
from storage.ledger import Interval, Ledger, Route, SessionRecord

RUN = "demo"
ROUTE = Route("lease/a/1", RUN, "a", "http://127.0.0.1:1", "embedded", 1, 0, "open")


def test_a_route_is_there_after_a_restart(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    first = Ledger(url)
    first.put_route(ROUTE)
    first.close()
    second = Ledger(url)
    assert second.routes() == [ROUTE]
    second.close()


def test_a_route_of_an_older_epoch_of_its_node_is_refused_also_after_deletion(ledger: Ledger) -> None:
    newer = replace(ROUTE, lease="lease/b/2", epoch=2)
    ledger.put_route(ROUTE)
    ledger.put_route(newer)
    assert ledger.routes() == [newer]
    with pytest.raises(FencedError, match="epoch 2"):
        ledger.put_route(ROUTE)
    ledger.delete_route(newer.lease, 2)
    with pytest.raises(FencedError, match="epoch 2"):
        ledger.put_route(ROUTE)
    assert ledger.routes() == []


def test_a_route_changes_version_and_state_within_its_epoch(ledger: Ledger) -> None:
    ledger.put_route(ROUTE)
    held = replace(ROUTE, state="held", version=3)
    ledger.put_route(held)
    assert ledger.routes() == [held]
    with pytest.raises(ConfigError, match="'ajar'"):
        ledger.put_route(replace(ROUTE, state="ajar"))


def test_a_late_deletion_leaves_the_newer_route(ledger: Ledger) -> None:
    ledger.put_route(replace(ROUTE, epoch=2))
    with pytest.raises(FencedError, match="epoch 2"):
        ledger.delete_route(ROUTE.lease, 1)
    assert len(ledger.routes()) == 1
    ledger.delete_route("never-there", 1)


def test_a_session_is_found_by_the_hash_of_its_key(ledger: Ledger, player: Any) -> None:
    player.admit(1)
    (claim, _) = player.claim(2)
    record = ledger.session_by_key_hash("hash-s-train-0-0-1")
    assert record == SessionRecord("s-train-0-0-1", "hash-s-train-0-0-1", RUN, claim.key, 1)
    assert ledger.session_by_key_hash("unknown") is None
    with pytest.raises(NotFoundError, match="'unknown'"):
        ledger.session("unknown")


def test_a_session_without_a_sample_keeps_its_policy(ledger: Ledger) -> None:
    record = SessionRecord("s-remote", "hash", RUN, None, 1, {"temperature": 0.5})
    ledger.put_session(record)
    ledger.put_session(record)
    assert ledger.session("s-remote") == record
    with pytest.raises(FencedError, match="another key"):
        ledger.put_session(replace(record, key_hash="other"))
    ledger.close_session("s-remote")
    ledger.close_session("s-remote")
    assert ledger.session("s-remote").closed


def test_metrics_of_a_step_are_replaced_not_doubled(ledger: Ledger) -> None:
    ledger.record_step(RUN, 0, 0, {"loss": 1.0})
    ledger.record_step(RUN, 0, 1, {"loss": 0.5})
    ledger.record_step(RUN, 0, 0, {"loss": 2.0})
    assert [(s.step, s.metrics) for s in ledger.steps(RUN)] == [(0, {"loss": 2.0}), (1, {"loss": 0.5})]


def test_an_interval_that_goes_on_moves_its_end(ledger: Ledger) -> None:
    ledger.record_interval(RUN, "a", "generate", 1.0, 2.0)
    ledger.record_interval(RUN, "a", "generate", 1.0, 3.0)
    ledger.record_interval(RUN, "b", "train", 0.5, 1.0)
    assert ledger.intervals(RUN) == [Interval("b", "train", 0.5, 1.0), Interval("a", "generate", 1.0, 3.0)]
    with pytest.raises(ConfigError, match="'sleep'"):
        ledger.record_interval(RUN, "a", "sleep", 1.0, 2.0)


def test_human_commands_are_kept_in_order(ledger: Ledger) -> None:
    ledger.audit("ann", "preempt", "maintenance", {"node": "a"})
    ledger.audit("bob", "resume", "done")
    assert [(e.actor, e.what, e.why, e.data) for e in ledger.audits()] == [
        ("ann", "preempt", "maintenance", {"node": "a"}),
        ("bob", "resume", "done", {}),
    ]
