#!/usr/bin/env python3
"""The dense part of `moonpipe plan`'s FLOPs against torch's own counter. Needs a Python with torch; nothing of the product does.

    python3 tests/bench/torch_flops.py build/dev/bin/moonpipe

Every matrix of a model is multiplied, forward and backward, by rows of the numbers that the batch gives, under
torch.utils.flop_counter. Attention is left out on both sides: torch counts whole squares where causal attention needs half of
them. What the product counts for it is known from itself: the same tokens in one document and in two.
"""
import json
import os
import subprocess
import sys
import tempfile

import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures")
TOKENS = 64
GRID = (8, 12)
KEYS = ("decoder", "vision", "projector")


def counted(moonpipe, config, documents, grids):
    """FLOPs of a step of one microbatch."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        step = {"microbatches": [{"index": 0, "tokens": sum(documents), "document_lengths": documents,
                                  "grids": [{"frames": 1, "rows": r, "columns": c} for r, c in grids],
                                  "feature_rows": sum(r * c // 4 for r, c in grids)}]}
        with open(os.path.join(folder, "step.json"), "w", encoding="utf-8") as file:
            json.dump(step, file)
        output = subprocess.run([moonpipe, "plan", "--model", file.name.replace("step.json", "config.json"), "--manifest", file.name,
                                 "--stages", "1", "--format", "json"], capture_output=True, text=True, check=True).stdout
    return json.loads(output)["flops_per_step"]


def dense_part(moonpipe, config, sees):
    """FLOPs without attention: halving every document and picture halves attention and leaves the rest."""
    rows, columns = GRID
    whole = counted(moonpipe, config, [TOKENS], [(rows, columns)] if sees else [])
    halves = counted(moonpipe, config, [TOKENS // 2] * 2, [(rows // 2, columns)] * 2 if sees else [])
    return {key: 2 * halves[key] - whole[key] for key in KEYS}


def product(rows, width_in, width_out):
    """Forward and both gradients of one matrix."""
    x = torch.randn(rows, width_in, requires_grad=True)
    weight = torch.randn(width_out, width_in, requires_grad=True)
    linear(x, weight).sum().backward()


def gated(rows, hidden, inner):
    product(rows, hidden, inner)
    product(rows, hidden, inner)
    product(rows, inner, hidden)


def decoder(text):
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    query = heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    for layer in range(text["num_hidden_layers"]):
        if text["q_lora_rank"]:
            product(TOKENS, hidden, text["q_lora_rank"])
            product(TOKENS, text["q_lora_rank"], query)
        else:
            product(TOKENS, hidden, query)
        product(TOKENS, hidden, text["kv_lora_rank"] + text["qk_rope_head_dim"])
        product(TOKENS, text["kv_lora_rank"], heads * (text["qk_nope_head_dim"] + text["v_head_dim"]))
        product(TOKENS, heads * text["v_head_dim"], hidden)
        if layer < text["first_k_dense_replace"]:
            gated(TOKENS, hidden, text["intermediate_size"])
            continue
        product(TOKENS, hidden, text["n_routed_experts"])
        chosen = torch.rand(TOKENS, text["n_routed_experts"]).topk(text["num_experts_per_tok"]).indices.flatten()
        for rows in torch.bincount(chosen, minlength=text["n_routed_experts"]).tolist():
            if rows:
                gated(rows, hidden, text["moe_intermediate_size"])
        gated(TOKENS, hidden, text["moe_intermediate_size"] * text["n_shared_experts"])
    product(TOKENS, hidden, text["vocab_size"])


def tower(vision):
    get = lambda name: vision.get("vt_" + name, vision.get(name))  # noqa: E731
    patches, width = GRID[0] * GRID[1], get("hidden_size")
    product(patches, 3 * vision["patch_size"] ** 2, width)
    for _ in range(get("num_hidden_layers")):
        product(patches, width, 3 * width)
        product(patches, width, width)
        product(patches, width, get("intermediate_size"))
        product(patches, get("intermediate_size"), width)


def projector(vision, text):
    merged = 4 * vision.get("vt_hidden_size", vision.get("hidden_size"))
    product(GRID[0] * GRID[1] // 4, merged, merged)
    product(GRID[0] * GRID[1] // 4, merged, text["hidden_size"])


def by_torch(function, *arguments):
    with FlopCounterMode(display=False) as counter:
        function(*arguments)
    return counter.get_total_flops()


def main():
    moonpipe = sys.argv[1]
    wrong = 0
    for name in ("kimi_vl_a3b", "moonlight", "kimi_k2_5"):
        with open(os.path.join(FIXTURES, name, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        text, sees = config.get("text_config", config), "vision_config" in config
        ours = dense_part(moonpipe, config, sees)
        theirs = {"decoder": by_torch(decoder, text),
                  "vision": by_torch(tower, config["vision_config"]) if sees else 0,
                  "projector": by_torch(projector, config["vision_config"], text) if sees else 0}
        for key in KEYS:
            equal = ours[key] == theirs[key]
            wrong += not equal
            print(f"{name:12} {key:10} {ours[key]:>14,} {'==' if equal else '!='} {theirs[key]:>14,} torch {torch.__version__}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
