"""Which SQL databases the ledger and the journal speak to, and what both of them say about it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import sqlalchemy as sa

from storage.errors import ConfigError

Durability = Literal["process", "power"]
"""What a commit survives: the death of every process of ours, or also a power cut (an fsync per commit)."""

BUSY_TIMEOUT_S = 30.0
"""How long a transaction waits for another process's write."""
CONNECT_LIMIT_S = 10

_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgresql+psycopg": "postgresql+psycopg"}


def database_url(what: str, url: str) -> sa.URL:
    """``url`` with the driver we use; the folder of a SQLite file is made.

    Raises:
        ConfigError: it is no URL, names another database or driver, or no file.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise ConfigError(f"{what}: no database URL ({error}); give {_FORMS}") from error
    shown = f"{what} {parsed.render_as_string()}"
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise ConfigError(f"{shown}: {parsed.drivername!r} is not supported; give {_FORMS}")
    if not parsed.database or parsed.database == ":memory:":
        raise ConfigError(f"{shown}: names no {'file' if driver == 'sqlite' else 'database'}; give {_FORMS}")
    if driver != "sqlite" and importlib.util.find_spec("psycopg") is None:
        raise ConfigError(f"{shown}: psycopg is not installed; it comes with the extras 'proxy' and 'control'")
    if driver == "sqlite":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    return parsed.set(drivername=driver)


_FORMS = "sqlite:////absolute/path/of/file.db or postgresql://user:password@host:5432/database"
