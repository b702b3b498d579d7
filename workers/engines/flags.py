"""Command line that all engines of ours share, so that a node agent starts any of them alike."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(description: str) -> argparse.ArgumentParser:
    """The common flags; an engine that has no use for one accepts it."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flags.add_argument("--model-path", type=Path, help="directory of a Hugging Face causal LM")
    flags.add_argument("--host", default="127.0.0.1", help="address to bind")
    flags.add_argument("--port", type=int, default=0, help="port to bind; 0 takes a free one")
    flags.add_argument("--weight-version", default="0", help="label of the weights at --model-path")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="type of the weights")
    flags.add_argument("--max-running", type=int, default=32, help="sequences decoded together")
    flags.add_argument("--max-context", type=int, help="longest prompt plus answer; default: the model's")
    flags.add_argument(
        "--kv-tokens", type=int, default=65536, help="tokens of KV for running sequences, and as many kept"
    )
    flags.add_argument("--threads", type=int, default=1, help="CPU threads")
    flags.add_argument("--log-tokens", type=Path, help="append every token read and written to this file")
    flags.add_argument("--seed", type=int, default=0, help="of requests that bring none")
    return flags
