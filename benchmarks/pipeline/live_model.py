"""The live bench's model: the tiny Qwen3 of the examples with random weights, which never ends its answer by itself.

python -m benchmarks.pipeline.live_model --out DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.models import tiny

CONTEXT = 1280
LAYERS = 8
"""Four times those of the examples' model: what directs the nodes shares their cores here, and is to be a small part of
what they do, as it is on clusters."""
BIAS = 4.0


def build(out: Path, seed: int = 0) -> None:
    """Write the model; one direction that all embeddings share makes the end token's logit about -16."""
    settings = tiny.new_model(seed).config.to_dict()
    changes = {"tie_word_embeddings": False, "max_position_embeddings": CONTEXT, "num_hidden_layers": LAYERS}
    changes["layer_types"] = settings["layer_types"][:1] * LAYERS
    config = Qwen3Config(**{**settings, **changes})
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = BIAS
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tiny.MARKERS.index(tiny.END), 0] = -2.0
    tiny.save(model, out)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
