"""The runs this proxy serves: specification and tokenizer of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.trajectory.policy import Policy, derive_seed
from proxy.trajectory.renderer import Renderer
from storage.errors import ConfigError
from storage.ledger import Ledger, SampleKey, evaluated_version
from workers.engines.base import FEATURES
from workflows.spec import EvaluationSpec, RunSpec, SamplingSpec

EXPIRY_SLACK_S = 60.0
"""Beyond an agent's time limit and one hold: whoever runs the agent ends its session before the proxy does."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that can be served."""

    name: str
    spec: RunSpec
    renderer: Renderer

    def policy(self, key: SampleKey | None = None) -> Policy:
        """What a session may do: training sessions sample as the run says, whatever the agent asks for.

        One that is of a sample (``key``) expires, counted from now.
        """
        spec = self.spec
        parsers = self.renderer.family.resolve(spec.model.tool_parser, spec.model.reasoning_parser)
        time_s = spec.agent.time_limit_s + spec.pipeline.hold_limit_s + EXPIRY_SLACK_S
        sampling: SamplingSpec | EvaluationSpec = spec.sampling
        version = None if key is None else evaluated_version(key.stream)
        if version is not None:
            sampling = spec.evaluation
        return Policy(
            model=self.name,
            max_context=spec.model.max_context,
            max_tokens=sampling.max_tokens or spec.sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=-1,
            seed=None if key is None else derive_seed(spec.seed, key.stream, key.ordinal, key.sample),
            max_turns=spec.agent.max_turns,
            max_session_tokens=spec.agent.max_session_tokens,
            expires=None if key is None else time.time() + time_s,
            hold_limit_s=spec.pipeline.hold_limit_s,
            version=version,
            tool_parser=parsers.tool_parser,
            tool_open=spec.model.tool_open,
            tool_close=spec.model.tool_close,
            reasoning_parser=parsers.reasoning_parser,
            history=spec.model.history,
            train_unused=spec.agent.train_unused,
            engine_features=tuple(sorted(FEATURES[spec.engine.kind])),
        )


class Runs:
    """Loads runs from the ledger when they are first needed; tokenizers are shared by model path."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._runs: dict[str, Run] = {}
        self._renderers: dict[str, Renderer] = {}
        self._loading = asyncio.Lock()

    async def create(self, run: str, spec: Mapping[str, Any], spec_digest: str) -> None:
        """Register a run; nothing is entered unless its model's tokenizer loads. Raises ConfigError."""
        parsed = _parse(run, spec)
        renderer = await self._renderer(parsed.model.path)
        await asyncio.to_thread(self._ledger.create_run, run, dict(spec), spec_digest)
        self._runs[run] = Run(run, parsed, renderer)

    async def get(self, run: str) -> Run:
        """Raises NotFoundError for a run that the ledger does not have."""
        if run not in self._runs:
            info = await asyncio.to_thread(self._ledger.run_info, run)
            spec = _parse(run, info.spec)
            self._runs[run] = Run(run, spec, await self._renderer(spec.model.path))
        return self._runs[run]

    async def _renderer(self, path: str) -> Renderer:
        async with self._loading:
            if path not in self._renderers:
                self._renderers[path] = await asyncio.to_thread(Renderer, path)
            return self._renderers[path]


def _parse(run: str, spec: Mapping[str, Any]) -> RunSpec:
    try:
        parsed = RunSpec.model_validate(spec)
    except ValueError as error:
        raise ConfigError(f"specification of run {run!r}: {error}") from None
    if parsed.run != run:
        raise ConfigError(f"specification of run {run!r} is that of run {parsed.run!r}: register it under its name")
    return parsed
