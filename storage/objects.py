"""The object store: immutable blobs by key over the MinIO client, for any S3 server.

Methods are synchronous and thread-safe. Answers of the server that pass (5xx,
broken connections) are tried again until a deadline; bytes that were asked for
with a digest are verified.
"""

from __future__ import annotations

import hashlib
import io
import re
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import urllib3
from minio import Minio
from minio.error import InvalidResponseError, S3Error, ServerError

from storage.errors import ConfigError, DeadlineError, IntegrityError, NotFoundError, StorageError

if TYPE_CHECKING:
    from workers.cluster import StateFolder

T = TypeVar("T")

REGION = "us-east-1"
_PAUSE_S = (0.05, 2.0)
_PART = 64 * 1024 * 1024
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_ABSENT = {"NoSuchKey", "NoSuchObject"}


class ObjectStore:
    """One bucket of one S3 server.

    Args:
        endpoint: ``host:port``.
        deadline_s: how long one call may take with all its retries.
        attempt_s: how long one attempt may wait for the server's next bytes.

    Raises:
        ConfigError: no S3 server takes this bucket name.
    """

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        access: str,
        secret: str,
        secure: bool = False,
        *,
        deadline_s: float = 60.0,
        attempt_s: float = 10.0,
    ) -> None:
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(f"bucket name {bucket!r}: use 3 to 63 lower-case letters, digits and hyphens")
        self.endpoint = endpoint
        self.bucket = bucket
        self.deadline_s = deadline_s
        # The retries are ours: the client's own would hide what happened, and have no deadline.
        pool = urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=min(5.0, attempt_s), read=attempt_s), retries=False, maxsize=16
        )
        self._client = Minio(
            endpoint, access_key=access, secret_key=secret, secure=secure, region=REGION, http_client=pool
        )
        self._pool = pool

    @classmethod
    def from_state(cls, state: StateFolder, *, deadline_s: float = 60.0) -> ObjectStore:
        """The store of the cluster in a state folder; ConfigError if the folder has none."""
        cluster, secrets = state.cluster(), state.secrets()
        keys = (secrets.s3_access_key, secrets.s3_secret_key)
        return cls(cluster.s3, cluster.bucket, *keys, cluster.s3_secure, deadline_s=deadline_s)

    def ensure_bucket(self) -> None:
        """Create the bucket if it is missing, then put and get a probe: listing answers before data can be stored."""
        self._retry("create bucket", self._make_bucket)
        key, data = f"probes/{uuid.uuid4().hex}", b"probe"
        self.get(key, sha256=self.put(key, data))
        self.delete(key)

    def put(self, key: str, data: bytes) -> str:
        """Store ``data`` under ``key``, replacing what was there; returns its sha256 hex."""

        def attempt() -> None:
            self._client.put_object(self.bucket, key, io.BytesIO(data), len(data), part_size=_PART)

        self._retry(f"put {key}", attempt)
        return hashlib.sha256(data).hexdigest()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store ``data`` unless ``key`` exists; returns whether it was stored.

        False may also mean that an attempt whose answer was lost had stored it:
        compare the content where that matters.
        """

        def attempt() -> bool:
            try:
                # The release has no public conditional put; a test fails if this one goes away.
                self._client._put_object(self.bucket, key, data, {"If-None-Match": "*"})
            except S3Error as error:
                if error.code in ("PreconditionFailed", "ConditionalRequestConflict"):
                    return False
                raise
            return True

        return self._retry(f"put {key}", attempt)

    def get(self, key: str, *, sha256: str | None = None) -> bytes:
        """The object's bytes.

        Raises:
            NotFoundError: no such object.
            IntegrityError: the bytes do not have the digest ``sha256``.
        """

        def attempt() -> bytes:
            response = self._client.get_object(self.bucket, key)
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()

        data = self._retry(f"get {key}", attempt)
        found = hashlib.sha256(data).hexdigest()
        if sha256 is not None and found != sha256:
            raise IntegrityError(f"object {self.bucket}/{key} has sha256 {found}, expected {sha256}")
        return data

    def list(self, prefix: str = "") -> list[str]:
        """Keys that start with ``prefix``, in order."""

        def attempt() -> list[str]:
            found = self._client.list_objects(self.bucket, prefix=prefix, recursive=True)
            return sorted(str(item.object_name) for item in found)

        return self._retry(f"list {prefix}", attempt)

    def delete(self, key: str) -> None:
        """Remove an object; one that does not exist is removed already."""
        self._retry(f"delete {key}", lambda: self._client.remove_object(self.bucket, key))

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _make_bucket(self) -> None:
        if self._client.bucket_exists(self.bucket):
            return
        try:
            self._client.make_bucket(self.bucket)
        except S3Error as error:
            if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    def _retry(self, what: str, attempt: Callable[[], T]) -> T:
        end = time.monotonic() + self.deadline_s
        pause, longest = _PAUSE_S
        while True:
            try:
                return attempt()
            except (S3Error, ServerError, InvalidResponseError, urllib3.exceptions.HTTPError) as error:
                if not _passes(error):
                    raise self._translate(what, error) from error
                if time.monotonic() + pause > end:
                    raise DeadlineError(
                        f"{what} at {self.endpoint}/{self.bucket} did not succeed within "
                        f"{self.deadline_s:.0f} s: {error}"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _translate(self, what: str, error: Exception) -> Exception:
        place = f"{self.endpoint}/{self.bucket}"
        if isinstance(error, S3Error):
            if error.code in _ABSENT:
                return NotFoundError(f"{what} at {place}: there is no such object")
            if error.code == "NoSuchBucket":
                return NotFoundError(f"{what}: there is no bucket {place}: call ensure_bucket at start-up")
            return StorageError(f"{what} at {place}: {error.code}: {error.message}")
        return StorageError(f"{what} at {place}: {error}")


def _passes(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, S3Error):
        return error.response.status >= 500 or error.code in ("SlowDown", "RequestTimeout")
    if isinstance(error, ServerError):
        return error.status_code >= 500
    # Broken connections, and answers of something that is not S3 (yet): a proxy, a server that starts.
    return True
