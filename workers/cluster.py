"""Where the parts of one cluster find each other.

``seamlessflow up`` writes ``cluster.json`` (addresses) and ``secrets.json``
(keys, mode 0600) into the state folder; every process reads them from the
folder named by ``SEAMLESSFLOW_STATE``. Addresses and secrets therefore never
travel through Temporal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from storage.errors import ConfigError

STATE_VARIABLE = "SEAMLESSFLOW_STATE"


class ClusterConfig(BaseModel):
    """Addresses of a cluster's services, as written to ``cluster.json``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: str = "local"
    temporal: str
    """``host:port`` of the Temporal front end."""
    namespace: str = "default"
    temporal_ui: str | None = None
    """URL of the Temporal UI."""
    proxy: str
    """Base URL of the trajectory proxy."""
    proxies: tuple[str, ...] = ()
    """Base URLs of all proxies where there are several; ``proxy`` is the first."""
    s3: str
    """``host:port`` of the object store."""
    s3_secure: bool = False
    bucket: str = "seamlessflow"
    ledger_url: str
    """SQLAlchemy URL of the ledger; opened by proxy and control processes only."""
    journal_url: str
    """SQLAlchemy URL of the journal; opened by the proxy only."""
    durability: Literal["process", "power"] = "process"
    """What a committed token or ledger row survives: any crash of ours, or a power cut too."""

    @property
    def proxy_urls(self) -> tuple[str, ...]:
        """Where the control API answers: any of them will do."""
        return self.proxies or (self.proxy,)


class Secrets(BaseModel):
    """Keys of a cluster, as written to ``secrets.json`` (mode 0600)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    control_key: str
    """Bearer key of the proxy's control API."""
    s3_access_key: str
    s3_secret_key: str


class StateFolder:
    """The folder with everything a cluster keeps on this machine.

    Layout: ``cluster.json secrets.json logs/ ledger.db journal.db temporal.db
    s3/ weights/<run>/ checkpoints/<run>/ tracking/<run>/ nodes/<node>/``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def from_environment(cls) -> StateFolder:
        """Raises :class:`ConfigError` if ``SEAMLESSFLOW_STATE`` is not set."""
        value = os.environ.get(STATE_VARIABLE)
        if not value:
            raise ConfigError(f"{STATE_VARIABLE} is not set: it names the state folder that `seamlessflow up` made")
        return cls(Path(value))

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def weights(self, run: str) -> Path:
        return self.root / "weights" / run

    def checkpoints(self, run: str) -> Path:
        return self.root / "checkpoints" / run

    @property
    def tracking(self) -> Path:
        return self.root / "tracking"

    def node(self, node: str) -> Path:
        return self.root / "nodes" / node

    def cluster(self) -> ClusterConfig:
        return ClusterConfig.model_validate_json(self._read("cluster.json"))

    def secrets(self) -> Secrets:
        return Secrets.model_validate_json(self._read("secrets.json"))

    def write(self, config: ClusterConfig, secrets: Secrets) -> None:
        """Replace both files atomically; ``secrets.json`` is readable by its owner only."""
        # The URL of a database server holds a password.
        mode = 0o644 if config.ledger_url.startswith("sqlite") else 0o600
        write_whole(self.root / "cluster.json", config.model_dump_json(indent=2), mode=mode)
        write_whole(self.root / "secrets.json", secrets.model_dump_json(indent=2))

    def _read(self, name: str) -> str:
        try:
            return (self.root / name).read_text()
        except FileNotFoundError:
            raise ConfigError(f"{self.root / name} does not exist: start the cluster with `seamlessflow up`") from None


def write_whole(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace ``path`` at once, never by halves; unless ``mode`` says otherwise only its owner can read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    temporary.replace(path)
