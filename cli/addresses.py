"""Addresses and keys of a local cluster: chosen at its first start, kept after."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from storage.databases import database_url
from storage.errors import ConfigError
from storage.ports import LOOPBACK, free_ports, is_free
from workers.cluster import ClusterConfig, Secrets, StateFolder

PORT_NAMES = ("temporal", "ui", "proxy", "s3")


def write_cluster(
    state: StateFolder, given: Mapping[str, int], proxies: int = 1, database: str | None = None
) -> ClusterConfig:
    """Write ``cluster.json`` and ``secrets.json``; addresses and keys of the last time are kept where possible.

    ``given`` maps names of :func:`port_names` to ports, ``database`` is a PostgreSQL URL. Raises :class:`ConfigError`
    if a port is taken or the database is not that of the last time.
    """
    check_ports(given, proxies)
    ledger_url, journal_url = check_database(state, proxies, database)
    ports = choose_ports(_old_ports(state), given, proxies)
    urls = tuple(f"http://{LOOPBACK}:{ports[name]}" for name in port_names(proxies) if name.startswith("proxy"))
    config = ClusterConfig(
        temporal=f"{LOOPBACK}:{ports['temporal']}",
        temporal_ui=f"http://{LOOPBACK}:{ports['ui']}",
        proxy=urls[0],
        proxies=urls if len(urls) > 1 else (),
        s3=f"{LOOPBACK}:{ports['s3']}",
        ledger_url=ledger_url,
        journal_url=journal_url,
    )
    state.write(config, _secrets(state))
    return config


def port_names(proxies: int = 1) -> tuple[str, ...]:
    """What a local cluster listens as."""
    return (*PORT_NAMES, *(f"proxy-{number}" for number in range(2, proxies + 1)))


def check_database(state: StateFolder, proxies: int, database: str | None) -> tuple[str, str]:
    """URLs of ledger and journal: SQLite files in the folder unless a server is given, or was the last time.

    Raises :class:`ConfigError` if the folder's books lie elsewhere, or several proxies would share SQLite files.
    """
    chosen = f"sqlite:///{state.root / 'ledger.db'}", f"sqlite:///{state.root / 'journal.db'}"
    known = _old_database(state)
    if database is not None:
        url = database_url("--database", database).render_as_string(hide_password=False)
        if known not in (None, url) or (state.root / "ledger.db").exists():
            raise ConfigError(f"the books of {state.root} lie in another database: use another --state folder")
        known = url
    if known is not None:
        chosen = known, known
    if proxies > 1 and any(url.startswith("sqlite") for url in chosen):
        raise ConfigError(
            f"{proxies} proxies cannot share SQLite files, which one process writes: give --database postgresql://..."
        )
    return chosen


def check_ports(given: Mapping[str, int], proxies: int = 1) -> None:
    """Raises :class:`ConfigError` if a name is not known, two have one port, or a port is taken."""
    for name, port in given.items():
        if name not in port_names(proxies):
            raise ConfigError(f"port {name!r} is not known: use one of {', '.join(port_names(proxies))}")
        if list(given.values()).count(port) > 1:
            raise ConfigError(f"port {port} for {name} is given twice: give each its own")
        if not is_free(port):
            raise ConfigError(f"port {port} for {name} is in use: stop what listens there, or give another port")


def choose_ports(old: Mapping[str, int], given: Mapping[str, int], proxies: int = 1) -> dict[str, int]:
    """A different free loopback port for each name: the given one, else the old one if free, else a new one."""
    ports = dict(given)
    for name in port_names(proxies):
        wanted = old.get(name, 0)
        if name not in ports and wanted and wanted not in ports.values() and is_free(wanted):
            ports[name] = wanted
    missing = [name for name in port_names(proxies) if name not in ports]
    fresh = (port for port in free_ports(len(missing) + len(ports)) if port not in ports.values())
    return ports | dict(zip(missing, fresh, strict=False))


def _old_database(state: StateFolder) -> str | None:
    """The database server of the last time, if there was one."""
    try:
        url = state.cluster().ledger_url
    except ConfigError:
        return None
    return None if url.startswith("sqlite") else url


def _old_ports(state: StateFolder) -> dict[str, int]:
    try:
        config = state.cluster()
    except ConfigError:
        return {}
    addresses = {"temporal": config.temporal, "ui": config.temporal_ui or "", "proxy": config.proxy, "s3": config.s3}
    addresses |= {f"proxy-{number}": url for number, url in enumerate(config.proxies[1:], 2)}
    ports = {name: address.rpartition(":")[2].rstrip("/") for name, address in addresses.items()}
    return {name: int(port) for name, port in ports.items() if port.isdigit()}


def _secrets(state: StateFolder) -> Secrets:
    try:
        return state.secrets()
    except ConfigError:
        return Secrets(
            control_key=f"sfc_{secrets.token_urlsafe(32)}",
            s3_access_key=secrets.token_hex(10),
            s3_secret_key=secrets.token_urlsafe(32),
        )
