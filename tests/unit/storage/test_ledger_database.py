"""Which databases the ledger opens, and what it does with one of another release."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest

from storage.errors import ConfigError
from storage.ledger import Ledger, SampleKey, SessionRecord


def old_ledger(folder: Path) -> str:
    """A ledger as version 2 left it."""
    connection = sqlite3.connect(folder / "ledger.db")
    connection.executescript((Path(__file__).parent / "ledger_v2.sql").read_text())
    connection.close()
    return f"sqlite:///{folder}/ledger.db"


def test_a_ledger_of_version_2_is_brought_up_to_this_one(tmp_path: Path) -> None:
    url = old_ledger(tmp_path)
    for _ in range(2):
        ledger = Ledger(url)
        began = ledger.run_info("demo").created
        remote = SessionRecord("s-remote", "hash-remote", "demo", None, 0, created=began)
        assert ledger.session("s-remote") == remote
        key = SampleKey("demo", "train", 0, 0)
        done = SessionRecord("s-0", "hash-0", "demo", key, 1, {"temperature": 0.5}, True, created=began, ended=began)
        assert ledger.session("s-0") == done
        assert ledger.sample(key).output == 5
        assert math.isnan(ledger.steps("demo")[0].metrics["loss"])
        assert ledger.books("demo").balanced
        assert ledger.route_table().generation == 0
        ledger.close()
    ledger = Ledger(url)
    ledger.own_session("s-remote", "p1", None)
    ledger.reward_session("s-remote", 1.0)
    ledger.count_turns("s-remote", 2, 0)
    ledger.register_proxy("p1", "http://p1", 60.0)
    assert ledger.put_route(ledger.routes()[0]) == 1
    assert ledger.session("s-remote").reward == 1.0
    ledger.close()


def test_a_ledger_of_an_unknown_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    Ledger(url).close()
    connection = sqlite3.connect(tmp_path / "ledger.db")
    connection.execute("UPDATE about SET value = '99' WHERE name = 'schema'")
    connection.commit()
    connection.close()
    with pytest.raises(ConfigError, match=r"has schema 99.*use the release that wrote it"):
        Ledger(url)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite+aiosqlite:///x.db", r"'sqlite\+aiosqlite' is not supported"),
        ("postgresql+psycopg2://host/db", r"'postgresql\+psycopg2' is not supported"),
        ("postgresql+asyncpg://host/db", "is not supported"),
        ("postgres://host/db", "'postgres' is not supported; give sqlite:.* or postgresql:"),
        ("mysql://host/db", "is not supported"),
        ("postgresql://host", "names no database"),
        ("ledger.db", "no database URL"),
        ("", "no database URL"),
    ],
)
def test_a_url_that_cannot_be_a_ledger_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Ledger(url)


def test_an_error_never_shows_the_password() -> None:
    with pytest.raises(ConfigError) as caught:
        Ledger("mysql://me:open-sesame@host/db")
    assert "open-sesame" not in str(caught.value)
