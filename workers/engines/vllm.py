"""Adapter for a real vLLM server, 0.32 or later, started as :mod:`workers.engines.vllm_launch` says.

Facts of vLLM 0.32 that decide it: its calls for weights are safe only while paused, a failed one shows nowhere, and the
version is a label apart, so the label is ``unknown`` from before a change until the change is proven; its metrics stand
still while paused; request ids carry a prefix; unknown parameters are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from storage.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnavailable
from workers.engines.base import Chunk, EngineInfo, Loaded, PauseMode, Sampling, Stats, TokenIds, Transfer
from workers.engines.candidate import Checkpoint, examine
from workers.engines.fingerprint import FLOATS
from workers.engines.http import HttpEngine
from workers.engines.sender import must_listen
from workers.engines.stream import version_label
from workers.engines.vllm_stream import (
    PREFIX,
    UNKNOWN,
    Served,
    VllmStreamReader,
    check_request,
    generate_body,
    version_of,
)
from workers.engines.vllm_witness import Witness

PROTOCOL = 1
"""Of the extension in the server's workers."""
PAUSES: dict[PauseMode, str] = {
    "in_place": "pause?mode=keep&clear_cache=false",
    "retract": "pause?mode=keep&clear_cache=true",  # running requests are pre-empted, whatever vLLM's text says
    "abort": "pause?mode=abort&clear_cache=true",
}
GAUGE = re.compile(r"^vllm:(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


class VllmEngine(HttpEngine):
    """An :class:`~workers.engines.base.Engine`; arguments as of :class:`HttpEngine`."""

    def __init__(self, url: str, **options: float) -> None:
        super().__init__(url, **options)
        self._known: Served | None = None
        self._live: set[str] = set()
        self._witness = Witness(self._label)
        self._warm = False
        self._changing = False

    async def generate(
        self, ids: TokenIds, sampling: Sampling, *, request_id: str, salt: str
    ) -> AsyncGenerator[Chunk, None]:
        """See :meth:`workers.engines.base.Engine.generate`."""
        served = await self.served()
        check_request(ids, sampling, served)
        if request_id in self._live:  # vLLM would take both, and one abort would end them
            raise EngineRejected(f"{self.url}: duplicate request id {request_id}: it is live")
        reader = VllmStreamReader(request_id, served.vocab_size, sampling.top_logprobs)
        body = generate_body(ids, sampling, request_id, salt)
        label = await self._witness.before()
        self._live.add(request_id)
        try:
            with self._witness.watching(reader, label) as watched:
                async with contextlib.aclosing(
                    self._stream("inference/v1/generate", body, reader, whole=sampling.whole)
                ) as chunks:
                    async for chunk in chunks:
                        yield chunk if chunk.finish is not None else chunk._replace(spans=watched.news())
        finally:
            self._live.discard(request_id)

    def continuable(self, sampling: Sampling) -> bool:
        """What depends on the output so far cannot move: a stop string that straddles a cut, a grammar, penalties."""
        return not (sampling.stop or sampling.json_schema or sampling.presence_penalty or sampling.frequency_penalty)

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the last step's tokens are out, so none of them counts for later weights."""
        await self._post(PAUSES[mode], {})

    async def resume(self) -> None:
        """Refused with weights that nobody knows."""
        if await self._label() == UNKNOWN:
            raise self._lost("they were being changed when something failed")
        await self._post("resume", {})

    async def abort(self, request_id: str | None) -> None:
        await self._post("abort_requests", {} if request_id is None else {"request_ids": [PREFIX + request_id]})
        if request_id is None:
            self._streams.hurry()

    async def load_weights(self, path: str, version: int, transfer: Transfer | None = None) -> Loaded:
        """See :meth:`workers.engines.base.Engine.load_weights`.

        The checksum is given if every tensor of the checkpoint was found again in the layers of the model.
        """
        served = await self.served()
        checkpoint = await asyncio.to_thread(examine, Path(path), served.model_path)
        if transfer is not None:
            await must_listen(transfer, self._deadline_s)  # the workers would wait for it, deaf to all else
        before, paused = await self._label(), await self._paused()
        current = version_of(before)
        if current is None or version <= current:
            await self.pause("retract")  # the salt does not tell these weights from others, so no KV may stay
        elif not paused:
            await self.pause("in_place")
        self._changing = True
        try:
            proven = await self._change(checkpoint, before, version_label(version, checkpoint.digest), transfer)
        finally:
            self._changing = False
            if not paused:
                with contextlib.suppress(EngineUnavailable):  # refused if nobody knows the weights; that is told anyway
                    await self.resume()
        return Loaded(version, checkpoint.digest if proven else None)

    async def release_memory(self) -> None:
        """Weights go to the host's memory, KV is dropped. Refused on the CPU, where vLLM says yes and does nothing."""
        if not (await self.served()).sleeps:
            raise EngineRejected(f"{self.url}: this server gives no memory back: it runs without --enable-sleep-mode")
        paused = await self._paused()
        await self.pause("in_place")
        load = await self.stats()
        if load.running + load.waiting:
            if not paused:
                await self.resume()
            raise EngineRejected(f"{self.url}: {load.waiting} requests are live: abort them before memory is released")
        await self._post("sleep?level=1&mode=keep", {}, deadline_s=self._load_deadline_s)

    async def resume_memory(self) -> None:
        if (await self.served()).sleeps:
            await self._post("wake_up", {}, deadline_s=self._load_deadline_s)

    async def flush_cache(self) -> None:
        """Drop the prefix cache; refused while requests are running."""
        answer = await self._post("reset_prefix_cache", {})
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineRejected(f"{self.url}: the prefix cache is in use: {answer!r}")

    async def ready(self) -> bool:
        """Whether it serves weights that are known, and has answered one request since this adapter was made.

        That first one takes seconds, in which vLLM compiles. ``/health`` alone stays green after a failed update.
        """
        try:
            await self._get("health")
            if self._changing:
                return True
            if await self._label() == UNKNOWN:
                return False
            if not self._warm and not await self._paused():
                await self._warm_up()
            self._warm = True
        except EngineProtocolError:
            return True  # it answers; what is wrong with it is told by the first call that needs it right
        except EngineError:
            return False
        return True

    async def info(self) -> EngineInfo:
        served, state = await self.served(), await self._state()
        return EngineInfo(str(state["path"]), version_of(await self._label()), served.vocab_size, served.max_context)

    async def stats(self) -> Stats:
        """Gauges stand still while paused: all that is live waits then."""
        paused, load = await self._paused(), await self._get("load")
        text = (await self._fetch("GET", "metrics", None, self._deadline_s)).decode()
        gauges = {name: (labels, float(value)) for name, labels, value in GAUGE.findall(text)}
        try:
            live = int(load["server_load"])
            running = 0 if paused else min(live, int(gauges["num_requests_running"][1]))
            size = re.search(r'kv_cache_size_tokens="(\d+)"', gauges["cache_config_info"][0])
            tokens = int(size[1]) if size is not None else 0
            return Stats(running, live - running, round(gauges["kv_cache_usage_perc"][1] * tokens))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineProtocolError(f"{self.url}: /load or /metrics lacks {error}") from None

    async def version(self) -> str:
        """Of the server's release."""
        answer = await self._get("version")
        return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else repr(answer)

    async def served(self) -> Served:
        """Asked once.

        Raises:
            EngineProtocolError: the server was started otherwise than this adapter needs it.
        """
        if self._known is None:
            state = await self._state()
            if state["logprobs_mode"] != "processed_logprobs":
                raise EngineProtocolError(
                    f"{self.url}: log-probs are {state['logprobs_mode']}, not those that tokens are drawn with: "
                    "start vLLM with --logprobs-mode processed_logprobs"
                )
            self._known = Served(
                model_path=Path(state["model_path"]),
                vocab_size=state["vocab_size"],
                max_context=state["max_context"],
                max_top_logprobs=state["max_logprobs"] - 1,
                sleeps=state["sleeps"],
                workers=state["workers"],
            )
        return self._known

    async def close(self) -> None:
        """See :meth:`workers.engines.base.Engine.close`."""
        await self._witness.close()
        await super().close()

    # Weights

    async def _change(self, checkpoint: Checkpoint, before: str, label: str, transfer: Transfer | None) -> bool:
        """From ``before`` to ``label``; whether every tensor was proven. The server is paused."""
        served, old = await self.served(), str((await self._state())["path"])
        await self._set_label(UNKNOWN)
        if transfer is None:
            answers = await self._workers("seamlessflow_load", [str(checkpoint.path)])
        else:
            answers = await self._receive(checkpoint, transfer)
        failed = [answer for answer in answers if not answer.get("loaded")]
        if failed:
            await self._put_back(old, before, failed, len(answers))
        with contextlib.suppress(EngineRejected):  # running requests hold blocks; the salt keeps others from these
            await self.flush_cache()
        await self._set_label(label)
        if served.workers != len(answers):
            raise EngineProtocolError(f"{self.url}: {len(answers)} workers answered of {served.workers}")
        return all(answer["proven"] == answer["seen"] for answer in answers)

    async def _put_back(self, old: str, before: str, failed: list[dict[str, Any]], workers: int) -> None:
        """A worker that failed has gone back by itself; the others have to. Raises what is to be told."""
        problem = failed[0].get("error")
        lost = next((answer["lost"] for answer in failed if answer.get("lost")), None)
        if lost is None and len(failed) < workers:
            answers = await self._workers("seamlessflow_load", [old])
            lost = next((answer["error"] for answer in answers if not answer.get("loaded")), None)
        if lost is not None:
            raise self._lost(lost)
        await self._set_label(before)
        raise EngineRejected(f"{self.url}: the weights stay as they were, since a load failed: {problem}")

    async def _receive(self, checkpoint: Checkpoint, transfer: Transfer) -> list[dict[str, Any]]:
        """From the group's rank 0. A worker to which not all of it comes reads again what it served from the disk."""
        broadcast = {
            **asdict(transfer),
            "names": [tensor.name for tensor in checkpoint.tensors],
            "dtypes": [FLOATS[tensor.dtype] for tensor in checkpoint.tensors],
            "shapes": [list(tensor.shape) for tensor in checkpoint.tensors],
            "timeout_s": self._load_deadline_s / 2,
        }
        return await self._workers("seamlessflow_receive", [str(checkpoint.path), broadcast])

    def _lost(self, why: str) -> EngineUnavailable:
        return EngineUnavailable(f"{self.url}: nobody knows the weights any more, the server must be restarted: {why}")

    async def _label(self) -> str:
        answer = await self._get("weight_info")
        if not isinstance(answer, dict) or not isinstance(answer.get("weight_version"), str):
            raise EngineProtocolError(f"{self.url}: /weight_info answered {answer!r}")
        return str(answer["weight_version"])

    async def _set_label(self, label: str) -> None:
        await self._post("update_weight_version", {"new_version": label})
        if (serving := await self._label()) != label:
            raise EngineProtocolError(f"{self.url}: asked for weights {label}, the engine serves {serving}")

    # Mechanics

    async def _paused(self) -> bool:
        answer = await self._get("is_paused")
        if not isinstance(answer, dict) or not isinstance(answer.get("is_paused"), bool):
            raise EngineProtocolError(f"{self.url}: /is_paused answered {answer!r}")
        return bool(answer["is_paused"])

    async def _state(self) -> dict[str, Any]:
        try:
            answers = await self._workers("seamlessflow_state", [])
        except (EngineProtocolError, EngineUnavailable) as error:  # no such path, or no such method
            if isinstance(error, EngineUnavailable) and "has no attribute" not in str(error):
                raise
            raise EngineProtocolError(
                f"{self.url}: this vLLM was not started for SeamlessFlow, which needs VLLM_SERVER_DEV_MODE=1 and "
                f"--worker-extension-cls seamlessflow_vllm.WorkerExtension: {error}"
            ) from error
        state = answers[0]
        if state.get("protocol") != PROTOCOL:
            raise EngineProtocolError(
                f"{self.url}: its workers speak protocol {state.get('protocol')}, this is {PROTOCOL}: restart it"
            )
        return state | {"workers": len(answers)}

    async def _workers(self, method: str, args: list[Any]) -> list[dict[str, Any]]:
        """Call the extension in every worker, between two steps."""
        answer = await self._post("collective_rpc", {"method": method, "args": args}, deadline_s=self._load_deadline_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(result, dict) for result in results):
            raise EngineProtocolError(f"{self.url}: {method} answered {answer!r}")
        return results

    async def _warm_up(self) -> None:
        sampling = Sampling(max_new_tokens=2, top_p=0.9, top_k=2, min_p=0.1, seed=0, top_logprobs=1)
        request = self.generate([0, 0], sampling, request_id=uuid.uuid4().hex, salt="warm-up")
        async with asyncio.timeout(self._load_deadline_s), contextlib.aclosing(request) as chunks:
            async for _ in chunks:
                pass
