"""``python -m workers.engines.embedded --model-path DIR --port N``: serve one model until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import sys

from storage.errors import EngineRejected
from workers.engines.embedded.engine import EmbeddedEngine, Settings
from workers.engines.flags import parser
from workers.engines.server import Server, serve_until_signalled


async def serve(settings: Settings, host: str, port: int) -> int:
    """Exit status: 1 if the model thread died."""
    engine = await EmbeddedEngine.start(settings)
    await serve_until_signalled(Server(engine), host, port, failed=engine.failed)
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
        return asyncio.run(serve(settings, arguments.host, arguments.port))
    except (EngineRejected, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
