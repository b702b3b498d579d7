"""Launch and residency files."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from storage.errors import ConfigError
from workers.trainer.launch import Launch, Residency

TOKEN = "a-token-of-some-length"


def _launch(make: Any, **changes: Any) -> Launch:
    values: dict[str, Any] = {
        "spec": make.make_spec(Path("/model")),
        "state": Path("/state"),
        "rank": 0,
        "world_size": 1,
        "master_port": 4000,
        "control_port": 4001,
        "token": TOKEN,
        "epoch": 3,
    }
    return Launch(**{**values, **changes})


def test_a_launch_file_is_read_as_it_was_written_and_is_private(make: Any, tmp_path: Path) -> None:
    launch = _launch(make, checkpoint=Path("/checkpoints/l0-s3"), cores=(1,))
    path = tmp_path / "new folder" / "launch.json"
    launch.write(path)
    assert Launch.read(path) == launch
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_missing_launch_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist"):
        Launch.read(tmp_path / "launch.json")


def test_a_wrong_launch_file_names_the_field_and_not_the_token(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "launch.json"
    path.write_text(_launch(make).model_dump_json().replace('"rank":0', '"rank":"zero"'))
    with pytest.raises(ConfigError, match=r"rank: Input should be a valid integer") as caught:
        Launch.read(path)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rank": 2, "world_size": 2}, "rank 2 does not exist"), ({"control_port": 0}, "control_port 0 needs residency")],
)
def test_contradictions_are_refused(make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _launch(make, **changes)


def test_secrets_are_not_in_what_is_logged(make: Any, tmp_path: Path) -> None:
    residency = Residency(
        pid=1,
        start_time=0.0,
        host="127.0.0.1",
        port=4001,
        token=TOKEN,
        epoch=1,
        rank=0,
        world_size=1,
        run="demo",
        launch="launch.json",
    )
    assert TOKEN not in f"{residency!r} {_launch(make)!r}"
    residency.write(tmp_path / "rank-0.json")
    assert stat.S_IMODE((tmp_path / "rank-0.json").stat().st_mode) == 0o600
    assert residency.url == "http://127.0.0.1:4001"
