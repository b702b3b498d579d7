"""Speed of the embedded engine: tokens per CPU-second at several batch sizes, and what sharing prefixes saves.

    python benchmarks/embedded_engine.py                      # a random model of 0.13 M parameters
    python benchmarks/embedded_engine.py --model-path DIR     # any model, e.g. SmolLM2-135M

CPU-seconds of the process, not wall time, so that a busy machine gives the same figures. Prints a table and, last, one
JSON line. Decoding counts prompt and HTTP out; the GRPO line is 8 prompts x 4 samples x 2 turns, all in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from workers.engines.embedded.engine import EmbeddedEngine
from workers.engines.embedded.settings import Settings
from workers.engines.wire import GenerateRequest

TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


def write_tiny(directory: Path) -> None:
    """The shape of the `demo-tiny` model, random weights."""
    torch.manual_seed(0)
    h, f, q, kv, d = 64, 192, 4 * 32, 2 * 32, 32
    tensors = {"model.embed_tokens.weight": torch.randn(64, h), "model.norm.weight": torch.ones(h)}
    for i in range(2):
        at = f"model.layers.{i}"
        shapes = {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        tensors |= {f"{at}.self_attn.{n}_proj.weight": torch.randn(s) * 0.1 for n, s in shapes.items()}
        tensors |= {f"{at}.self_attn.{n}_norm.weight": torch.ones(d) for n in ("q", "k")}
        tensors |= {f"{at}.mlp.{n}_proj.weight": torch.randn(f, h) * 0.1 for n in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = torch.randn(h, f) * 0.1
        tensors |= {f"{at}.{n}_layernorm.weight": torch.ones(h) for n in ("input", "post_attention")}
    (directory / "config.json").write_text(json.dumps(TINY))
    save_file(tensors, directory / "model.safetensors")


class Bench:
    def __init__(self, engine: EmbeddedEngine, seed: int) -> None:
        self._engine = engine
        self._random = Random(seed)  # noqa: S311 - prompts
        self._vocab = engine.model_info()["vocab_size"]
        self._count = 0

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(length)]

    async def ask(self, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """Output ids, and process CPU time at the first event."""
        self._count += 1
        request = GenerateRequest(
            f"{self._count:032d}", tuple(prompt), tokens, logprobs=True, ignore_eos=True, stream=True, salt="0"
        )
        ids: list[int] = []
        first = 0.0
        async for event in self._engine.generate(request):
            first = first or time.process_time()
            ids += event["output_ids"]
        return ids, first

    async def decode(self, batch: int, prompt: int, tokens: int) -> dict[str, float]:
        """Tokens per CPU-second after every request has had its first token."""
        shared = self.prompt(prompt)
        await self.ask(shared, 1)  # its KV is in the cache now
        start = time.process_time()
        await asyncio.gather(*(self.ask(shared, tokens) for _ in range(batch)))
        used = time.process_time() - start
        return {"batch": batch, "tokens_per_cpu_s": batch * tokens / used, "step_ms": 1000 * used / tokens}

    async def grpo(self, prompt: int, first: int, result: int, second: int) -> dict[str, float]:
        """CPU seconds of one step's generation: 4 prompts x 8 samples, two turns."""
        before = self._engine.server_info()["prefilled_tokens"]
        start = time.process_time()

        async def episode(ids: list[int]) -> int:
            answer, _ = await self.ask(ids, first)
            final, _ = await self.ask(ids + answer + self.prompt(result), second)
            return len(answer) + len(final)

        prompts = [self.prompt(prompt) for _ in range(4)]
        counts = await asyncio.gather(*(episode(ids) for ids in prompts for _ in range(8)))
        used = time.process_time() - start
        return {
            "cpu_s": used,
            "tokens_per_cpu_s": sum(counts) / used,
            "prefilled_tokens": self._engine.server_info()["prefilled_tokens"] - before,
        }


async def run(path: Path, dtype: Any, prompt: int, tokens: int) -> dict[str, Any]:
    start = time.monotonic()
    engine = await EmbeddedEngine.start(Settings(path, dtype=dtype))
    loaded = time.monotonic() - start
    bench = Bench(engine, seed=0)
    await bench.decode(2, 16, 4)  # warm up
    result = {
        "bench": "embedded_engine",
        "model": path.name,
        "dtype": dtype,
        "compute": engine.server_info()["compute_dtype"],
        "load_s": loaded,
        "decode": [await bench.decode(batch, prompt, tokens) for batch in (1, 8, 32)],
        "grpo_step": await bench.grpo(prompt, 20, 15, 12),
    }
    await engine.stop()
    return result


def show(result: dict[str, Any]) -> None:
    print(f"{result['model']}, {result['dtype']} computed in {result['compute']}, loaded in {result['load_s']:.2f} s")
    print(f"{'batch':>6} {'tokens/CPU-s':>13} {'ms/step':>9}")
    for row in result["decode"]:
        print(f"{row['batch']:>6} {row['tokens_per_cpu_s']:>13.1f} {row['step_ms']:>9.2f}")
    step = result["grpo_step"]
    print(f"GRPO step, 4 x 8 samples, 2 turns: {step['cpu_s']:.2f} CPU-s, {step['prefilled_tokens']} tokens prefilled")
    print(json.dumps({k: v for k, v in result.items()}, default=str))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model-path", type=Path, help="default: a random tiny model")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags.add_argument("--prompt", type=int, help="prompt tokens; default 135 with a model, 24 with the tiny one")
    flags.add_argument("--tokens", type=int, help="tokens per request; default 32 with a model, 128 with the tiny one")
    arguments = flags.parse_args()
    if arguments.model_path is not None:
        model, dtype = arguments.model_path, arguments.dtype
        show(asyncio.run(run(model, dtype, arguments.prompt or 135, arguments.tokens or 32)))
        return
    with tempfile.TemporaryDirectory() as directory:
        tiny = Path(directory) / "tiny-qwen3"
        tiny.mkdir()
        write_tiny(tiny)
        show(asyncio.run(run(tiny, arguments.dtype, arguments.prompt or 24, arguments.tokens or 128)))


if __name__ == "__main__":
    main()
