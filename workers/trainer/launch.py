"""The launch file: everything one trainer rank needs to start. Written by the node agent, read once by the rank.

It holds the control port's token, so it is written with mode 0600. No torch here.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage.errors import ConfigError
from workers.cluster import write_whole
from workflows.messages import GangRole
from workflows.spec import RunSpec


class Launch(BaseModel):
    """One rank of a gang; only rank, port, token and residency differ between the ranks of one machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    spec: RunSpec
    """The run."""
    role: GangRole = "trainer"
    """What the gang is for, and so which models it holds (:attr:`models`)."""
    state: Path
    """State folder of the cluster: object store address and keys, checkpoints, weights."""
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    local_rank: int = Field(default=0, ge=0)
    """Position among the ranks of this machine."""
    master_addr: str = "127.0.0.1"
    master_port: int = Field(ge=1, le=65535)
    """Rendezvous of the process group; rank 0 listens there."""
    control_host: str = "127.0.0.1"
    control_port: int = Field(default=0, ge=0, le=65535)
    """Where the rank answers; 0 takes a free port, told by ``residency``."""
    token: str = Field(min_length=16, repr=False)
    """Bearer token of the control port."""
    epoch: int = Field(ge=0)
    """Fencing token of the lease that started the rank."""
    checkpoint: Path | None = None
    """Checkpoint folder to resume from; None starts from ``spec.model.path`` at version 0."""
    checkpoint_digest: str | None = None
    """Digest the checkpoint must have; None skips the comparison (the files are still verified)."""
    residency: Path | None = None
    """File the rank writes when its control port listens: :class:`Residency` as JSON, mode 0600. None: no file."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the rank."""
    cores: tuple[int, ...] = ()
    """CPU cores the rank is pinned to; empty leaves it free."""
    start_limit_s: float = Field(default=300.0, gt=0)
    """Deadline for the gang to meet and load its state."""

    @model_validator(mode="after")
    def _consistent(self) -> Launch:
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} does not exist in a gang of {self.world_size}: ranks count from 0")
        if self.control_port == 0 and self.residency is None:
            raise ValueError("control_port 0 needs residency: nothing else would tell which port was taken")
        return self

    @property
    def models(self) -> frozenset[str]:
        """Which of ``policy``, ``reference`` and ``critic`` the gang holds."""
        if self.role != "trainer":
            return frozenset({self.role})
        return frozenset({"policy", *self.spec.algorithm.companions}) - set(self.spec.algorithm.companions_apart)

    @classmethod
    def read(cls, path: Path) -> Launch:
        """Raises :class:`ConfigError` if the file is missing or wrong."""
        try:
            return cls.model_validate_json(path.read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"launch file {path} does not exist: the node agent writes it before it starts a rank"
            ) from None
        except ValidationError as error:
            # Only places and reasons: the offending values may hold the token.
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"launch file {path} is wrong: {problems}") from None

    def write(self, path: Path) -> None:
        """Replace ``path`` atomically; readable by its owner only."""
        write_whole(path, self.model_dump_json())


class Residency(BaseModel):
    """How to find a running rank again: pid and start time name the process, port and token reach it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    pid: int
    start_time: float
    """As :func:`storage.processes.started_at` gives it: tells a process from a later one with the same pid."""
    host: str
    port: int
    token: str = Field(repr=False)
    epoch: int
    """Epoch of the lease that started the rank; later leases are told by each request."""
    rank: int
    world_size: int
    run: str
    launch: str
    """Path of the launch file."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def write(self, path: Path) -> None:
        """Replace ``path`` atomically; readable by its owner only."""
        write_whole(path, self.model_dump_json())
