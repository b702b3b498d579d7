"""Published weights: one immutable folder per version, with digests, on a disk that engines and trainers share.

``<root>/<version>-<digest>/`` holds the files of a Hugging Face model and a
``manifest.json`` with the sha256 of each, written last. A version that is made
again with other weights (after a rewind, where training is not reproducible to
the bit) is another folder: nothing is overwritten.

``<root>/.pins/<holder>.json`` names the folders that a node's engine serves, falls
back to or loads. They stay until the node lets go of them, however old they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.errors import ConfigError, IntegrityError, NotFoundError

MANIFEST = "manifest.json"
PINS = ".pins"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class WeightsRef:
    """Weights at rest: folder ``path`` holds ``version``, its safetensors have ``digest``."""

    version: int
    path: str
    digest: str


class WeightsStore:
    """The published weights of one run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, version: int) -> Path:
        """A new empty folder to write the files of ``version`` into; give it to :meth:`commit`."""
        temporary = self.root / f".tmp-{version:08d}-{uuid.uuid4().hex}"
        temporary.mkdir(parents=True)
        return temporary

    def commit(self, version: int, temporary: Path) -> WeightsRef:
        """Publish the folder in one rename; weights that are published already are kept and ``temporary`` removed.

        Raises:
            ConfigError: there is no ``*.safetensors`` in the folder.
        """
        files = file_digests(temporary)
        digest = weights_digest(files, temporary)
        final = self.root / f"{version:08d}-{digest[:16]}"
        if final.is_dir():
            self.verify(final)
            shutil.rmtree(temporary)
        else:
            content = {"version": version, "digest": digest, "files": files}
            (temporary / MANIFEST).write_text(json.dumps(content, indent=2, sort_keys=True))
            temporary.rename(final)
        return WeightsRef(version, str(final), digest)

    def get(self, version: int, digest: str | None = None) -> WeightsRef:
        """The published weights of a version; the newest where it was made twice and no digest is given.

        Raises:
            NotFoundError: not published, or collected.
        """
        found = [ref for ref in self.published() if ref.version == version and digest in (None, ref.digest)]
        if not found:
            raise NotFoundError(f"no weights of version {version} (digest {digest or 'any'}) in {self.root}")
        return found[-1]

    def latest(self) -> WeightsRef | None:
        """The newest version, None before the first."""
        published = self.published()
        return published[-1] if published else None

    def verify(self, path: Path) -> str:
        """Read every file and compare; returns the digest.

        Raises:
            IntegrityError: a file is missing or differs from the folder's manifest.
        """
        manifest = _read_manifest(path)
        found = file_digests(path)
        for name, expected in manifest.files.items():
            if found.get(name) != expected:
                raise IntegrityError(f"{path / name} is {found.get(name, 'missing')}, its manifest says {expected}")
        digest = weights_digest(found, path)
        if digest != manifest.ref.digest:
            raise IntegrityError(f"weights in {path} have digest {digest}, its manifest says {manifest.ref.digest}")
        return digest

    def pin(self, holder: str, paths: Iterable[str]) -> None:
        """Keep these folders, and no others on behalf of ``holder``; paths outside the store need no pin."""
        names = sorted({Path(path).name for path in paths if Path(path).resolve().parent == self.root.resolve()})
        pins = self.root / PINS
        if not names:
            (pins / f"{holder}.json").unlink(missing_ok=True)
            return
        pins.mkdir(parents=True, exist_ok=True)
        temporary = pins / f"{holder}.tmp"
        temporary.write_text(json.dumps(names))
        temporary.replace(pins / f"{holder}.json")

    def collect(self, keep: int, *, every: int | None = None) -> list[WeightsRef]:
        """Remove all but the newest ``keep`` folders, each ``every``-th version and the pinned ones; returns what.

        Abandoned temporary folders go too.
        """
        if keep < 1:
            raise ConfigError(f"keep is {keep}: at least one version of the weights must stay")
        published = self.published()
        pinned = self._pinned()
        spared = [ref for ref in published if every is not None and ref.version % every == 0]
        old = [ref for ref in published[:-keep] if Path(ref.path).name not in pinned and ref not in spared]
        for ref in old:
            shutil.rmtree(ref.path)
        newest = published[-1].version if published else -1
        for temporary in self.root.glob(".tmp-*"):
            if int(temporary.name.split("-")[1]) <= newest:
                shutil.rmtree(temporary)
        return old

    def _pinned(self) -> set[str]:
        return {name for file in (self.root / PINS).glob("*.json") for name in json.loads(file.read_text())}

    def published(self) -> list[WeightsRef]:
        """All that is there, oldest version first."""
        folders = [path for path in self.root.glob("[0-9]*-*") if (path / MANIFEST).is_file()]
        folders.sort(key=lambda path: (int(path.name.split("-")[0]), (path / MANIFEST).stat().st_mtime_ns))
        return [_read_manifest(path).ref for path in folders]


@dataclass(frozen=True)
class _Manifest:
    ref: WeightsRef
    files: Mapping[str, str]


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 hex of each file in a folder, its manifest left out."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != MANIFEST)
    return {path.name: _sha256(path) for path in files}


def weights_digest(files: Mapping[str, str], folder: Path) -> str:
    """sha256 over the sorted ``name:sha256`` lines of the safetensors: the identity of weights everywhere.

    Raises:
        ConfigError: there is no ``*.safetensors``.
    """
    lines = sorted(f"{name}:{digest}" for name, digest in files.items() if name.endswith(".safetensors"))
    if not lines:
        raise ConfigError(f"{folder} holds no *.safetensors: these are no weights")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """Digest of the weights in any model folder, published or not."""
    names = sorted(folder.glob("*.safetensors"))
    return weights_digest({path.name: _sha256(path) for path in names}, folder)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read_manifest(path: Path) -> _Manifest:
    try:
        content = json.loads((path / MANIFEST).read_text())
        return _Manifest(WeightsRef(int(content["version"]), str(path), content["digest"]), content["files"])
    except FileNotFoundError:
        raise NotFoundError(f"{path} holds no {MANIFEST}: these weights were never published") from None
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path / MANIFEST} is not readable: {error}") from error
