"""``python -m workers.engines.embedded --model-path DIR --port N``: serve one model until SIGTERM.

Exit status: 0 after SIGTERM, 1 if the model thread died, 2 if the port or the model cannot be used.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys

from storage.errors import EngineRejected
from workers.engines.checkpoint import check_headers
from workers.engines.embedded.architectures import read_config
from workers.engines.embedded.settings import Settings
from workers.engines.flags import parser
from workers.engines.server import Server, bind, serve_until_signalled


async def serve(settings: Settings, listener: socket.socket) -> int:
    """Load the model, then serve it; returns the exit status."""
    from workers.engines.embedded.engine import EmbeddedEngine  # torch: not before the arguments are known to be good

    engine = await EmbeddedEngine.start(settings)
    await serve_until_signalled(Server(engine), listener, failed=engine.failed)
    if engine.failed.is_set():
        return 1
    await engine.stop()
    return 0


def main() -> int:
    flags = parser("Serves one Hugging Face causal LM on the CPU over SGLang's native wire.")
    arguments = flags.parse_args()
    if arguments.model_path is None:
        flags.error("--model-path is needed")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings(
        model_path=arguments.model_path,
        weight_version=arguments.weight_version,
        dtype=arguments.dtype,
        max_running=arguments.max_running,
        kv_tokens=arguments.kv_tokens,
        max_context=arguments.max_context,
        threads=arguments.threads,
        log_tokens=arguments.log_tokens,
        seed=arguments.seed,
    )
    try:
        read_config(settings.model_path)
        check_headers(settings.model_path)
        with bind(arguments.host, arguments.port) as listener:
            return asyncio.run(serve(settings, listener))
    except (EngineRejected, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
