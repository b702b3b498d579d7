"""Adapter for a real SGLang server, 0.5.21 or later: what the shared wire leaves open, made safe.

Facts of SGLang 0.5.23 that decide it: an id outside the vocabulary, or a checkpoint that cannot be loaded, kills the
server, so both are found out here; a pause with ``abort`` after one ``in_place`` never returns, so it is built from a
retraction and an abort; an update is noted only under a new label; the prefix cache knows no versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from storage.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnavailable
from workers.engines.base import EngineInfo, Loaded, PauseMode, Sampling, TokenIds, Transfer
from workers.engines.candidate import Checkpoint, examine
from workers.engines.fingerprint import FLOATS, differing
from workers.engines.sender import must_listen
from workers.engines.sglang import SglangEngine
from workers.engines.sglang_checks import Served, check_release, read_served
from workers.engines.stream import version_label


@dataclass(slots=True)
class _Proofs:
    """Checksums of the engine by digest of the files, where they cannot be told from the files."""

    by_digest: dict[str, str] = field(default_factory=dict)
    digest: str | None = None
    """Of what is served; None: not known here."""


class SglangServer(SglangEngine):
    """An :class:`~workers.engines.base.Engine` at ``url``; arguments as of :class:`SglangEngine`."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._served: Served | None = None
        self._proofs = _Proofs()
        self._rid_length: int | None = None

    async def served(self) -> Served:
        """Asked once. Raises :class:`EngineProtocolError` for a server that is too old or not one of SGLang's."""
        if self._served is None:
            model, server = await self._get("model_info"), await self.server_info()
            try:
                check_release(str(server["version"]))
                self._served = read_served(model, server)
            except (KeyError, TypeError) as error:
                raise EngineProtocolError(f"{self.url}: /server_info or /model_info lacks {error}") from None
            self._vocab_size = self._served.vocab_size
        return self._served

    async def server_info(self) -> Mapping[str, Any]:
        """The server's own account of itself."""
        answer = await self._get("server_info")
        if not isinstance(answer, dict):
            raise EngineProtocolError(f"{self.url}: /server_info answered {answer!r}")
        return answer

    async def ready(self) -> bool:
        """``/health`` says no while the server starts; it makes no token (the launcher sees to it) and works paused."""
        try:
            await self._get("health")
        except EngineError:
            return False
        return True

    async def info(self) -> EngineInfo:
        served = await self.served()
        return replace(await super().info(), vocab_size=served.vocab_size, max_context=served.max_context)

    async def pause(self, mode: PauseMode) -> None:
        """``abort`` too leaves the server retracted: its own mode of that name polls for a second, holds a lock
        meanwhile and never returns after ``in_place``."""
        await self._post("pause_generation", {"mode": "in_place" if mode == "in_place" else "retract"})
        if mode == "abort":
            await self.abort(None)
        # Both are only sent to the scheduler; this asks it, so they have arrived.
        await self.server_info()

    async def release_memory(self) -> None:
        """Refused without ``--enable-memory-saver``, where the server would say yes and keep all of it."""
        if not (await self.served()).memory_saver:
            raise EngineRejected(f"{self.url}: this server gives no memory back: it runs without --enable-memory-saver")
        paused = await self._paused()
        await self.pause("retract")  # a request that found no memory would kill the server
        try:
            await self.flush_cache()  # refused while requests are live; a release would kill the server then
        except EngineRejected:
            if not paused:
                await self.resume()
            raise
        await super().release_memory()

    async def resume_memory(self) -> None:
        await super().resume_memory()
        await self.resume()

    async def load_weights(self, path: str, version: int, transfer: Transfer | None = None) -> Loaded:
        """See :meth:`workers.engines.base.Engine.load_weights`; the version is confirmed by the tensors' checksums."""
        served = await self.served()
        if transfer is not None and served.data_parallel > 1:
            raise EngineRejected(f"{self.url}: SGLang takes no broadcast with data_parallel {served.data_parallel}")
        checkpoint = await asyncio.to_thread(examine, Path(path), served.model_path)
        before = await self._checksums()
        label = version_label(version, checkpoint.digest)
        flush = await self._must_flush(version)
        if transfer is None:
            await self._load_from_disk(path, label, flush)
        else:
            await self._receive(transfer, checkpoint, label, flush)
        await self._confirm(label)
        await self._prove(served, checkpoint, before)
        return Loaded(version, checkpoint.digest)

    async def _admit(self, ids: TokenIds, sampling: Sampling, request_id: str) -> None:
        served = await self.served()
        await super()._admit(ids, sampling, request_id)
        for what, tokens in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", sampling.logit_bias)):
            for token in tokens:
                if not 0 <= token < served.vocab_size:
                    raise EngineRejected(f"{what}: id {token} is outside the vocabulary of {served.vocab_size}")
        total = len(ids) + sampling.max_new_tokens
        if total > served.max_context:
            raise EngineRejected(
                f"{len(ids)} prompt tokens + max_new_tokens {sampling.max_new_tokens} = {total} "
                f"exceed the context of {served.max_context} tokens"
            )
        self._rid_length = self._rid_length or len(request_id)
        if len(request_id) != self._rid_length:  # an abort of "r-1" would abort "r-10" too
            raise EngineRejected(f"request id {request_id!r} is not of {self._rid_length} characters like the others")

    # Weights

    async def _must_flush(self, version: int) -> bool:
        """Whether the prefix cache can go with the old weights: if nothing runs. Retracted requests would find the KV
        there that they had. In place, salts keep versions apart, unless the version is not a new one: then what runs is
        retracted after all."""
        current = (await super().info()).weight_version
        if current is not None and version <= current:
            if await self._paused():
                await self.pause("retract")
            return True  # unpaused, the update waits until nothing runs
        try:
            await self.flush_cache()
        except EngineRejected:
            return False
        return True

    async def _paused(self) -> bool:
        try:
            await self._get("ready")
        except EngineUnavailable:
            return True
        return False

    async def _load_from_disk(self, path: str, label: str, flush: bool) -> None:
        body = {"model_path": path, "weight_version": label, "flush_cache": flush}
        await self._update("update_weights_from_disk", body)

    async def _receive(self, transfer: Transfer, checkpoint: Checkpoint, label: str, flush: bool) -> None:
        """From the group's rank 0. Once the server has joined, a failure leaves weights that nobody knows."""
        await must_listen(transfer, self._deadline_s)  # the server would wait half an hour, deaf to all else
        await self._update(
            "init_weights_update_group",
            {
                "master_address": transfer.address,
                "master_port": transfer.port,
                "rank_offset": transfer.rank,
                "world_size": transfer.world_size,
                "group_name": transfer.group,
                "backend": transfer.backend,
            },
        )
        try:
            await self._update("begin_weight_update", {})
            body = {
                "names": [tensor.name for tensor in checkpoint.tensors],
                "dtypes": [FLOATS[tensor.dtype] for tensor in checkpoint.tensors],
                "shapes": [list(tensor.shape) for tensor in checkpoint.tensors],
                "group_name": transfer.group,
                "weight_version": label,
                "flush_cache": flush,
            }
            await self._update("update_weights_from_distributed", body)
            await self._update("end_weight_update", {})
        except EngineError as error:
            raise EngineUnavailable(
                f"{self.url}: a broadcast failed midway, its weights are unknown: {error}"
            ) from error
        finally:
            with suppress(EngineError):  # the group is never used again, whatever becomes of it
                await self._post("destroy_weights_update_group", {"group_name": transfer.group})

    async def _update(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._post(path, body, deadline_s=self._load_deadline_s)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineProtocolError(f"{self.url}: {path} answered {answer!r}")

    async def _confirm(self, label: str) -> None:
        serving = (await self._get("model_info")).get("weight_version")
        if serving != label:
            raise EngineProtocolError(f"{self.url}: asked for weights {label}, the engine serves {serving}")

    async def _checksums(self) -> dict[str, Any]:
        """``ranks``, each with the ``checksums`` of its tensors, and one ``per_engine_checksum``."""
        answer = await self._post("weights_checker", {"action": "checksum"}, deadline_s=self._load_deadline_s)
        if not isinstance(answer, dict) or not answer.get("per_engine_checksum") or not answer.get("ranks"):
            raise EngineProtocolError(f"{self.url}: /weights_checker answered {answer!r}")
        return answer

    async def _prove(self, served: Served, checkpoint: Checkpoint, before: dict[str, Any]) -> None:
        """That the tensors served are those of the checkpoint. Where its checksums cannot be told from the files, other
        files must give another checksum, and the same files the same."""
        after = await self._checksums()
        if served.provable:
            for rank in after["ranks"]:
                expected = await asyncio.to_thread(checkpoint.checksums, list(rank["checksums"]), served.dtype)
                if not expected or (wrong := differing(rank["checksums"], expected)):
                    raise self._unproven(checkpoint, f"{len(wrong) if expected else 'all'} tensors differ")
            return
        proofs, value = self._proofs, str(after["per_engine_checksum"])
        known = proofs.by_digest.setdefault(checkpoint.digest, value)
        changed = value != before["per_engine_checksum"]
        if known != value or (proofs.digest not in (None, checkpoint.digest) and not changed):
            raise self._unproven(checkpoint, f"checksum {value}, known {known}, before {before['per_engine_checksum']}")
        proofs.digest = checkpoint.digest

    def _unproven(self, checkpoint: Checkpoint, how: str) -> EngineUnavailable:
        return EngineUnavailable(f"{self.url}: the engine does not serve {checkpoint.path}: {how}")
