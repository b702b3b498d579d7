"""``make contract-engines``: the suite on every engine that is built here; its last line is the result as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Tally:
    """Counts one run of the suite by the engine that each test names."""

    passed: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        kind = str(properties.get("engine", ""))
        if not kind:
            return
        self.versions[kind] = str(properties.get("version", ""))
        if report.failed:
            self.failed[kind] = self.failed.get(kind, 0) + 1
        elif report.when == "call" and report.passed:
            self.passed[kind] = self.passed.get(kind, 0) + 1

    def rows(self) -> list[dict[str, object]]:
        """One for each engine that was run."""
        # Not before pytest has its hooks in place: it rewrites assertions of what is imported later.
        from tests.contract.engines.rigs.base import ABILITIES
        from tests.contract.engines.rigs.every import KINDS, rig_of

        return [
            {
                "engine": kind,
                "version": self.versions[kind],
                "passed": self.passed.get(kind, 0),
                "failed": self.failed.get(kind, 0),
                "refused": sorted(ABILITIES - rig_of(kind).abilities),
            }
            for kind in KINDS
            if kind in self.versions
        ]


def main() -> int:
    """Arguments go to pytest, e.g. ``-k sglang``."""
    tally = Tally()
    here = Path(__file__).parent
    suite = [
        str(file)
        for file in sorted(here.glob("test_*.py"))
        if file.name not in ("test_wire.py", "test_engine_processes.py")
    ]
    # A real server takes minutes to start on a machine that has other things to do.
    status = pytest.main(["-q", "-rs", "-o", "timeout=1200", *suite, *sys.argv[1:]], plugins=[tally])
    print(json.dumps({"bench": "contract-engines", "rows": tally.rows()}))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
