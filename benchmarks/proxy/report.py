"""The table and the JSON line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.proxy.growth import Growth
from benchmarks.proxy.held import Held
from benchmarks.proxy.measure import Result, Scenario
from benchmarks.proxy.scenarios import ALONE_STREAM, LONG, STREAM, WHOLE
from benchmarks.proxy.statistics import median, percentile, table

ENGINE, OURS, POWER, RLLM = "engine alone", "ours, process crash", "ours, power loss", "rllm-model-gateway"
ROUTERS = ("smg", "sglang-router", "vllm-router")
Results = Mapping[str, Mapping[str, Result]]
"""Scenario -> contestant -> result."""

_HEAD = ("", "CPU ms", "spread", "req/s", "first +p50", "+p99 ms", "total +p50", "+p99 ms")


def headline(results: Results, growth: Growth, held: Held) -> dict[str, Any]:
    """The figures that the bars are about; None where a peer does not run here."""
    stream = results[STREAM]
    routers = [stream[name].cpu() for name in ROUTERS if name in stream]
    gateway = median(stream[RLLM].rate) if RLLM in stream else None
    alone = results[ALONE_STREAM]
    figures: dict[str, Any] = {
        "stream_cpu_ms_4k": stream[OURS].cpu(),
        "nonstream_cpu_ms_4k": results[WHOLE][OURS].cpu(),
        "stream_cpu_ms_100k": results[LONG][OURS].cpu(),
        "ttft_added_ms_p50": alone[OURS].first_added(alone[ENGINE]),
        "throughput_ratio_rllm": median(stream[OURS].rate) / gateway if gateway else None,
        "cpu_ratio_best_router": stream[OURS].cpu() / min(routers) if routers else None,
        "session_mb_64x100k": growth.resident_mb,
        "journal_bytes_per_token": growth.bytes_per_token[1],
    }
    figures = {name: None if value is None else round(value, 3) for name, value in figures.items()}
    return {"bench": "proxy", **figures, "held_errors": held.errors, "held_duplicates": held.duplicates}


def scenario_table(scenario: Scenario, results: Mapping[str, Result]) -> str:
    """CPU is per request, median and spread of the rounds; latency is what is added to the engine's own."""
    direct = results[ENGINE]
    rows = []
    for name, result in results.items():
        cpu = ("", "") if name == ENGINE else (f"{result.cpu():.2f}", _spread(result.cpu_ms))
        rate = f"{median(result.rate):.0f}"
        if name == ENGINE:
            waits = [
                percentile(values, share) for values in (result.first_ms, result.total_ms) for share in (0.5, 0.99)
            ]
            rows.append((name, *cpu, rate, *(f"={wait:.1f}" for wait in waits)))
            continue
        first = [result.first_added(direct, share) for share in (0.5, 0.99)]
        total = [result.added(direct, share) for share in (0.5, 0.99)]
        rows.append((name, *cpu, rate, *(f"{wait:.1f}" for wait in (*first, *total))))
    return f"{scenario.name}\n{table(_HEAD, rows)}"


def growth_table(growths: Mapping[str, Growth], turns: int) -> str:
    head = ("a session grown", "turns", "tokens", "resident MB", "written MB", "bytes/new token", "second half")
    rows = [
        (
            name,
            str(turns),
            f"{growth.tokens:.0f}",
            f"{growth.resident_mb:.2f}",
            f"{growth.written_mb:.2f}",
            f"{growth.bytes_per_token[0]:.1f}",
            f"{growth.bytes_per_token[1]:.1f}",
        )
        for name, growth in growths.items()
    ]
    return table(head, rows)


def held_table(held: Held, seconds: float) -> str:
    head = ("held through a weight update", "requests", "seconds", "errors", "duplicates", "tokens again", "unproved")
    figures = (held.requests, f"{seconds:g}", held.errors, held.duplicates, held.tokens_again, held.unproved)
    note = f"\nfirst error: {held.first_error}" if held.first_error else ""
    return table(head, [("ours, process crash", *(str(figure) for figure in figures))]) + note


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f}-{max(values):.2f}"
