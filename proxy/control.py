"""The control API: runs, samples, scores, sessions, routes. Bearer control key; JSON in and out."""

from __future__ import annotations

import hmac
import secrets
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from proxy.peers import PASSED_ON, Elsewhere, Peers
from proxy.service import Service
from proxy.trajectory.policy import Limits
from storage import errors
from storage.ledger import Route

_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""What the databases take as an integer."""
_Epoch = Annotated[int, Field(ge=0, le=2**63 - 1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RunBody(_Body):
    run: str
    spec: dict[str, Any]
    spec_digest: str


class AdmissionBody(_Body):
    stream: str
    admit_until: _Count
    target_in_flight: _Count
    samples_per_task: _Count = Field(ge=1)
    paused: bool = False


class ClaimBody(_Body):
    stream: str
    worker: str
    limit: _Count
    holding: list[str] | None = None
    """Sessions the worker has already; given when an earlier answer may have been lost."""


class FinishBody(_Body):
    session: str
    output: Any = None


class FailBody(_Body):
    session: str
    cause: str
    detail: str = ""
    retry: bool = False


class ReleaseBody(_Body):
    stream: str
    worker: str


class ScoreClaimBody(_Body):
    worker: str
    limit: _Count


class RewardBody(_Body):
    reward: float | None = None
    cause: str | None = None
    detail: str = ""

    def checked(self) -> RewardBody:
        """Raises InvalidRequest unless there is either a reward or a cause."""
        if (self.reward is None) == (self.cause is None):
            raise errors.InvalidRequest("give either `reward`, or `cause` (and `detail`) of a missing one")
        return self


class ScoreBody(RewardBody):
    session: str


class LimitsBody(_Body):
    max_turns: _Count | None = Field(default=None, ge=1)
    max_session_tokens: _Count | None = Field(default=None, ge=1)
    time_limit_s: float | None = Field(default=None, gt=0)


class SessionBody(_Body):
    run: str
    parent: str | None = None
    limits: LimitsBody = LimitsBody()
    label: str | None = Field(default=None, max_length=200)
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=200)
    """Asked for again with the same one, the session is the one that was made."""


class OutputBody(_Body):
    output: Any = None


class RouteBody(_Body):
    run: str
    node: str
    url: str
    epoch: _Epoch
    version: _Count
    state: Literal["open", "held", "closed"]
    engine_kind: str = "embedded"


_STATUS: tuple[tuple[type[errors.SeamlessFlowError], int], ...] = (
    (errors.AuthenticationFailed, 401),
    (errors.SessionClosed, 403),
    (errors.NotFoundError, 404),
    (errors.FencedError, 409),
    (errors.DeadlineError, 504),
    (errors.ConfigError, 400),
    (errors.RequestError, 400),
    (errors.RewardError, 400),
    (errors.SeamlessFlowError, 500),
)


def control_app(service: Service, control_key: str) -> FastAPI:
    """The FastAPI application over ``service``; only ``/healthz`` needs no key."""
    app = FastAPI(title="SeamlessFlow proxy, control API", docs_url=None, redoc_url=None, openapi_url=None)

    async def authorised(authorization: str = Header(default="")) -> None:
        given = authorization.removeprefix("Bearer ").strip()
        if not secrets.compare_digest(given.encode(), control_key.encode()):
            raise errors.AuthenticationFailed("the control API needs `Authorization: Bearer <control key>`")

    key = [Depends(authorised)]
    _add_errors(app)
    _add_runs(app, service, key)
    _add_samples(app, service, key)
    _add_sessions(app, service, key, control_key)
    _add_routes(app, service, key)
    if service.peers is not None:
        _add_peers(app, service, service.peers, key)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(errors.SeamlessFlowError)
    async def ours(_: Request, error: errors.SeamlessFlowError) -> JSONResponse:
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        return JSONResponse({"error": {"type": type(error).__name__, "message": str(error)}}, status)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        """A path that does not exist, or not with that method."""
        return JSONResponse({"error": {"type": "NotFoundError", "message": error.detail}}, error.status_code)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = "; ".join(f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in error.errors())
        return JSONResponse({"error": {"type": "InvalidRequest", "message": problems}}, 400)


def _add_runs(app: FastAPI, service: Service, key: list[Any]) -> None:
    @app.post("/control/runs", dependencies=key)
    async def create(body: RunBody) -> dict[str, str]:
        await service.create_run(body.run, body.spec, body.spec_digest)
        return {"run": body.run}

    @app.get("/control/runs/{run}", dependencies=key)
    async def status(run: str) -> dict[str, Any]:
        return await service.run_status(run)

    @app.post("/control/runs/{run}/admission", dependencies=key)
    async def admission(run: str, body: AdmissionBody) -> dict[str, str]:
        await service.set_admission(run, **body.model_dump())
        return {"run": run}

    @app.get("/control/runs/{run}/audit", dependencies=key)
    async def audit(run: str) -> dict[str, Any]:
        return await service.audit(run)


def _add_samples(app: FastAPI, service: Service, key: list[Any]) -> None:
    desk = service.desk

    @app.post("/control/runs/{run}/samples/claim", dependencies=key)
    async def claim(run: str, body: ClaimBody) -> list[dict[str, Any]]:
        return await desk.claim(run, body.stream, body.worker, body.limit, body.holding)

    @app.post("/control/runs/{run}/samples/finish", dependencies=key)
    async def finish(run: str, body: FinishBody) -> dict[str, str]:
        return {"state": await desk.finish(run, body.session, body.output)}

    @app.post("/control/runs/{run}/samples/fail", dependencies=key)
    async def fail(run: str, body: FailBody) -> dict[str, str]:
        return {"state": await desk.fail(run, body.session, body.cause, body.detail, retry=body.retry)}

    @app.post("/control/runs/{run}/samples/release", dependencies=key)
    async def release(run: str, body: ReleaseBody) -> dict[str, str]:
        await desk.release(run, body.stream, body.worker)
        return {"worker": body.worker}

    @app.post("/control/runs/{run}/scores/claim", dependencies=key)
    async def claim_scores(run: str, body: ScoreClaimBody) -> list[dict[str, Any]]:
        return await desk.claim_scores(run, body.worker, body.limit)

    @app.post("/control/runs/{run}/scores/commit", dependencies=key)
    async def commit_score(run: str, body: ScoreBody) -> dict[str, str]:
        reward = body.checked().reward
        if reward is not None:
            await desk.score(run, body.session, reward)
        else:
            await desk.fail_score(run, body.session, body.cause or "", body.detail)
        return {"session": body.session}


def _add_sessions(app: FastAPI, service: Service, key: list[Any], control_key: str) -> None:
    desk = service.session_desk

    @app.post("/control/sessions", dependencies=key)
    async def create(body: SessionBody) -> dict[str, str]:
        secret = None
        if body.idempotency_key is not None:  # of which the session's key is made: nobody else may be able to
            named = f"{body.run}\0{body.idempotency_key}".encode()
            secret = hmac.digest(control_key.encode(), named, "sha256")
        new = await desk.create(body.run, Limits(**body.limits.model_dump()), body.parent, body.label, secret)
        return {"session": new.session, "api_key": new.api_key, "base_url": new.base_url, "model": new.model}

    @app.get("/control/sessions/{session}", dependencies=key)
    async def inspect(session: str) -> dict[str, Any]:
        return await desk.inspect(session)

    @app.post("/control/sessions/{session}/finish", dependencies=key)
    async def finish(session: str, body: OutputBody) -> dict[str, str]:
        return {"session": session, "state": await desk.finish(session, body.output)}

    @app.post("/control/sessions/{session}/reward", dependencies=key)
    async def reward(session: str, body: RewardBody) -> dict[str, str]:
        given = body.checked()
        await desk.reward(session, given.reward, given.cause, given.detail)
        return {"session": session}

    @app.get("/control/runs/{run}/sessions", dependencies=key)
    async def list_sessions(
        run: str, open_only: bool = False, after: str = "", limit: int = Query(default=100, ge=1, le=1000)
    ) -> list[dict[str, Any]]:
        return await desk.list(run, open_only=open_only, after=after, limit=limit)


def _add_routes(app: FastAPI, service: Service, key: list[Any]) -> None:
    routes = service.routes

    @app.get("/control/routes", dependencies=key)
    async def list_routes() -> list[dict[str, Any]]:
        return routes.describe()

    @app.put("/control/routes/{lease:path}", dependencies=key)
    async def put(lease: str, body: RouteBody) -> dict[str, str]:
        await routes.put(Route(lease=lease, **body.model_dump()))
        return {"lease": lease, "state": body.state}

    @app.delete("/control/routes/{lease:path}", dependencies=key)
    async def delete(lease: str, epoch: _Epoch) -> dict[str, str]:
        await routes.delete(lease, epoch)
        return {"lease": lease}


def _add_peers(app: FastAPI, service: Service, peers: Peers, key: list[Any]) -> None:
    """What other proxies ask, and requests about sessions that are theirs."""

    @app.exception_handler(Elsewhere)
    async def elsewhere(request: Request, owner: Elsewhere) -> Response:
        if request.headers.get(PASSED_ON) or not owner.url:  # the session moves this moment
            return Response(status_code=503)
        path = request.scope["raw_path"] + b"?" + request.scope["query_string"]
        status, body = await peers.client(owner.url).pass_on(
            request.method, path.decode("latin-1"), await request.body()
        )
        return Response(body, status, media_type="application/json")

    @app.post("/control/peer/routes", dependencies=key)
    async def refresh() -> dict[str, int]:
        await peers.refresh()
        return {"generation": service.routes.in_force}

    @app.post("/control/peer/sessions/{session}/end", dependencies=key)
    async def end(session: str) -> dict[str, str]:
        await service.sessions.end(session)
        return {"session": session}

    @app.get("/control/peer/runs/{run}", dependencies=key)
    async def activity(run: str) -> dict[str, Any]:
        return service.activity(run)
