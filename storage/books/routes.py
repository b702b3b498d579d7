"""Routes to engines, and the proxies that act on them.

Every change of the routes raises their *generation*. A proxy holds a lease, says
with each renewal which generation it acts on, and without a lease starts
nothing. So a change is in force everywhere once :meth:`Routes.unacknowledged`
names nobody: each proxy that lives acts on it, and one that did not renew has
no lease any more. Leases are measured by the database's clock.
"""

from __future__ import annotations

from dataclasses import asdict

import sqlalchemy as sa

from storage.books.database import Part, clock, exclusively, upsert
from storage.books.records import ProxyRecord, Route, RouteTable
from storage.books.schema import about, node_epochs, proxies, routes
from storage.errors import ConfigError, FencedError

ROUTE_STATES = ("open", "held", "closed")
FORGET_PROXY_S = 86_400.0
"""How long a proxy that died is listed."""
_GENERATION = "route_generation"


class Routes(Part):
    """The route table, fenced by the epochs of nodes, and the leases of proxies."""

    def put_route(self, route: Route) -> int:
        """Set the route of a lease; it replaces routes of older epochs on its node. Returns the new generation.

        Raises:
            FencedError: the node was leased with a newer epoch since.
        """
        if route.state not in ROUTE_STATES:
            raise ConfigError(
                f"route of lease {route.lease!r} has state {route.state!r}: must be one of {ROUTE_STATES}"
            )
        with self._db.write() as connection:
            generation = _next_generation(connection)
            _advance_epoch(connection, route.node, route.epoch)
            older = (routes.c.node == route.node) & (routes.c.epoch < route.epoch)
            connection.execute(routes.delete().where(older))
            upsert(connection, routes, ("lease",), asdict(route))
        return generation

    def delete_route(self, lease: str, epoch: int) -> int:
        """Remove the route of a lease; one that is not there is removed already. Returns the new generation.

        Raises:
            FencedError: the route belongs to a newer epoch.
        """
        with self._db.write() as connection:
            generation = _next_generation(connection)
            found = connection.scalar(sa.select(routes.c.epoch).where(routes.c.lease == lease))
            if found is not None and found > epoch:
                raise FencedError(f"route of lease {lease!r} is at epoch {found}: epoch {epoch} may not delete it")
            connection.execute(routes.delete().where(routes.c.lease == lease))
        return generation

    def routes(self) -> list[Route]:
        """All routes by lease."""
        return list(self.route_table().routes)

    def route_table(self) -> RouteTable:
        """All routes with their generation."""
        with self._db.read() as connection:
            rows = connection.execute(sa.select(routes).order_by(routes.c.lease)).all()
            return RouteTable(_generation(connection), tuple(Route(**row._mapping) for row in rows))

    def register_proxy(self, proxy: str, url: str, lease_s: float) -> None:
        """A proxy process begins: it has a lease, and has seen no routes yet."""
        with self._db.write() as connection:
            now = clock(connection)
            connection.execute(proxies.delete().where(proxies.c.lease_until < now - FORGET_PROXY_S))
            row = {"proxy": proxy, "url": url, "lease_until": now + lease_s, "routes_seen": 0}
            upsert(connection, proxies, ("proxy",), row)

    def renew_proxy(self, proxy: str, lease_s: float, routes_seen: int) -> int:
        """Renew a lease that has not run out; the proxy acts on generation ``routes_seen``. Returns the newest one.

        A proxy counts its lease from before this call, and must load the routes if there are newer ones.

        Raises:
            FencedError: the lease ran out or was given back. Changes of routes came into force without this proxy:
                it must register again and load the routes before it starts anything.
        """
        with self._db.write() as connection:
            now = clock(connection)
            mine = (proxies.c.proxy == proxy) & (proxies.c.lease_until >= now)
            newest = sa.case((proxies.c.routes_seen > routes_seen, proxies.c.routes_seen), else_=routes_seen)
            change = proxies.update().where(mine).values(lease_until=now + lease_s, routes_seen=newest)
            if connection.execute(change).rowcount == 0:
                raise FencedError(f"the lease of proxy {proxy!r} has run out: it must register again")
            return _generation(connection)

    def retire_proxy(self, proxy: str) -> None:
        """Give the lease back; twice is allowed. The proxy has stopped, or was found dead."""
        with self._db.write() as connection:
            connection.execute(proxies.delete().where(proxies.c.proxy == proxy))

    def proxies(self, *, live_only: bool = True) -> list[ProxyRecord]:
        """Proxies by id: those with a lease, or also those whose lease ran out lately."""
        with self._db.read() as connection:
            return _proxies(connection, sa.true() if not live_only else proxies.c.lease_until >= clock(connection))

    def unacknowledged(self, generation: int) -> list[ProxyRecord]:
        """Living proxies that do not act on ``generation`` yet: while there are any, it is not in force."""
        with self._db.read() as connection:
            behind = (proxies.c.lease_until >= clock(connection)) & (proxies.c.routes_seen < generation)
            return _proxies(connection, behind)


def _proxies(connection: sa.Connection, condition: sa.ColumnElement[bool]) -> list[ProxyRecord]:
    rows = connection.execute(sa.select(proxies).where(condition).order_by(proxies.c.proxy))
    return [ProxyRecord(**row._mapping) for row in rows]


def _generation(connection: sa.Connection) -> int:
    return int(connection.scalar(sa.select(about.c.value).where(about.c.name == _GENERATION)) or 0)


def _next_generation(connection: sa.Connection) -> int:
    # Writers of routes exclude each other here: node epochs cannot be locked before they are there.
    exclusively(connection, "routes")
    generation = _generation(connection) + 1
    upsert(connection, about, ("name",), {"name": _GENERATION, "value": str(generation)})
    return generation


def _advance_epoch(connection: sa.Connection, node: str, epoch: int) -> None:
    known = connection.scalar(sa.select(node_epochs.c.epoch).where(node_epochs.c.node == node))
    if known is not None and epoch < known:
        raise FencedError(f"node {node!r} is at epoch {known}: a route of epoch {epoch} is refused")
    if known != epoch:
        upsert(connection, node_epochs, ("node",), {"node": node, "epoch": epoch})
