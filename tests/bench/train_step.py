#!/usr/bin/env python3
"""Times a training step of ours and of the peer, step by step in turn, and prints medians and ranges.

    scripts/build dev train_step
    tests/bench/train_step.py build/dev/tests/bench/train_step --peer-python VENV/bin/python [--pairs 7] [--threads 2]
    tests/bench/train_step.py build/dev/tests/bench/train_step --growth
    tests/bench/train_step.py build/dev/tests/bench/train_step --recompute

The peer needs a Python with torch 2.11 and transformers 5; it runs twice, eager and compiled. The model has 70 M parameters in the form
of Kimi K2.5: 512 tokens, 256 of them features of one picture of 448 x 448 pixels. --growth varies our own model instead,
--recompute what its backward makes again.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def config(layers=6, experts=8):
    text = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 16384, "hidden_size": 512,
        "intermediate_size": 2048, "moe_intermediate_size": 512, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 8, "n_routed_experts": experts, "num_experts_per_tok": 2, "n_shared_experts": 1, "q_lora_rank": 256,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "routed_scaling_factor": 2.827,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
                         "mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 262144, "tie_word_embeddings": False, "attention_bias": False, "num_nextn_predict_layers": 0,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    vision = {
        "vt_hidden_size": 384, "vt_intermediate_size": 1536, "vt_num_hidden_layers": 4, "vt_num_attention_heads": 6, "patch_size": 14,
        "init_pos_emb_height": 64, "init_pos_emb_width": 64, "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed",
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "video_attn_type": "spatial_temporal", "mm_projector_type": "patchmerger",
        "mm_hidden_size": 384, "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": 512}
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "bos_token_id": 0, "eos_token_id": 1,
            "pad_token_id": 2, "ignore_index": -100, "media_placeholder_token_id": 5, "tie_word_embeddings": False,
            "text_config": text, "vision_config": vision}


class Stepper:
    def __init__(self, name, command, environment=None):
        self.name, self.steps = name, []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def step(self, keep=True):
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self.process.wait()}")
        if keep:
            self.steps.append(json.loads(line))

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def column(self, key):
        return [step[key] for step in self.steps]


def median_and_range(values, digits=3):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def run_in_turn(steppers, pairs, warmup=2):
    for stepper in steppers:
        for _ in range(warmup):
            stepper.step(keep=False)
    for _ in range(pairs):
        for stepper in steppers:
            stepper.step()
    for stepper in steppers:
        stepper.close()


def report(steppers):
    ours = steppers[-1]
    print(f"{'':10} {'step s':>24} {'forward':>8} {'backward':>8} {'AdamW':>6} {'peak MiB':>9} {'our tokens/s':>24} {'our memory':>10}")
    for stepper in steppers:
        ratios = [theirs / mine for theirs, mine in zip(stepper.column("seconds"), ours.column("seconds"))]
        memory = max(ours.column("peak_mib")) / max(stepper.column("peak_mib"))
        print(f"{stepper.name:10} {median_and_range(stepper.column('seconds')):>24} {statistics.median(stepper.column('forward')):8.3f} "
              f"{statistics.median(stepper.column('backward')):8.3f} {statistics.median(stepper.column('optimizer')):6.3f} "
              f"{max(stepper.column('peak_mib')):9} {median_and_range(ratios, 2):>22} x {memory:8.2f} x")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--peer-python")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled peer out")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        def stepper(name, command, tokens=512, recompute=None, **changes):
            path = os.path.join(folder, f"{name}.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(config(**changes), file)
            flags = ["--compile"] if name == "compiled" else [recompute] if recompute else []
            return Stepper(name, [*command, path, str(tokens), "32", "32", str(arguments.threads), *flags],
                           dict(os.environ, OMP_NUM_THREADS=str(arguments.threads), MKL_NUM_THREADS=str(arguments.threads)))

        ours = [arguments.binary]
        if arguments.growth:
            steppers = [stepper("64-experts", ours, experts=64), stepper("1024-tokens", ours, tokens=1024),
                        stepper("12-layers", ours, layers=12), stepper("base", ours)]
            run_in_turn(steppers, arguments.pairs)
            report(steppers)
            return
        if arguments.recompute:
            steppers = [stepper(f"recompute-{kind}", ours, recompute=kind) for kind in ("experts", "layers", "none")]
            run_in_turn(steppers, arguments.pairs)
            report(steppers)
            return
        peer = [arguments.peer_python, os.path.join(HERE, "train_step_peer.py")]
        steppers = [stepper("eager", peer)] + ([] if arguments.no_compile else [stepper("compiled", peer)]) + [stepper("ours", ours)]
        run_in_turn(steppers, arguments.pairs)
        report(steppers)


if __name__ == "__main__":
    main()
