"""Local activities that put engines' routes into force in the proxy."""

from __future__ import annotations

from temporalio import activity

from proxy.client import ControlClient
from storage.errors import FencedError
from workflows.messages import RouteInput


class RouteActivities:
    """Each call returns once the route is in force; an epoch out of date is refused by the proxy."""

    def __init__(self, proxy: ControlClient) -> None:
        self._proxy = proxy

    @activity.defn(name="put_route")
    async def put_route(self, route: RouteInput) -> None:
        """Open or hold a lease's route."""
        await self._proxy.put_route(
            route.lease,
            run=route.run,
            node=route.node,
            url=route.url,
            epoch=route.epoch,
            version=route.version,
            state=route.state,
            engine_kind=route.engine_kind,
        )

    @activity.defn(name="close_route")
    async def close_route(self, route: RouteInput) -> None:
        """Cut what runs on the route (it continues elsewhere) and forget it."""
        try:
            await self._proxy.delete_route(route.lease, route.epoch)
        except FencedError:  # a newer lease owns the route: ours is closed already
            activity.logger.info("route %s/%d was replaced by a newer one", route.lease, route.epoch)
