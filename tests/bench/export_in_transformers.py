#!/usr/bin/env python3
"""A checkpoint of ours, loaded by transformers, gives our logits: before training and after five steps.

    tests/bench/export_in_transformers.py build/dev/bin/moonpipe     (a Python with torch, transformers 5 and safetensors)

Trains the recorded Moonlight in tests/fixtures on its own batch, through the services.
"""
import os
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open

FIXTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "moonlight")
CASE = "padded"
TOLERANCE = 2e-4  # of logits that reach about 5; the two add in different orders

RUN = """
model: {{path: {model}}}
data: {{batches: {fixture}/io.safetensors, batch_case: {case}}}
pipeline: {{stages: 2, microbatches: 2}}
train: {{steps: {steps}, seed: 1, expert_bias_rate: 0}}
optimizer: {{learning_rate: {rate}, schedule: {{kind: constant}}}}
"""


def train(moonpipe, folder, name, model, steps, rate):
    """The run's folder."""
    run_file = os.path.join(folder, f"{name}.yaml")
    with open(run_file, "w", encoding="utf-8") as file:
        file.write(RUN.format(model=model, fixture=os.path.abspath(FIXTURE), case=CASE, steps=steps, rate=rate))
    run = os.path.join(folder, f"run-{name}")
    subprocess.run([moonpipe, "train", run_file, "--run-folder", run], check=True, stdout=subprocess.DEVNULL)
    return run


def observed_logits(run):
    folder = os.path.join(run, "observed")
    for name in os.listdir(folder):
        with safe_open(os.path.join(folder, name), "pt") as file:
            if "out/logits" in file.keys():
                return file.get_tensor("out/logits")
    sys.exit(f"no worker observed logits in {folder}")


def checkpoint(run):
    folder = os.path.join(run, "checkpoints")
    return os.path.join(folder, sorted(os.listdir(folder))[-1])


def transformers_logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with safe_open(os.path.join(FIXTURE, "io.safetensors"), "pt") as file:
        batch = {key: file.get_tensor(f"{CASE}/in/{key}") for key in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    return logits[batch["attention_mask"] > 0]


def compare(what, ours, theirs):
    difference = (ours - theirs).abs().max().item()
    print(f"{what}: largest difference of {ours.numel()} logits {difference:.2e}, largest logit {theirs.abs().max().item():.2f}")
    return difference <= TOLERANCE


def main():
    moonpipe = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        before = train(moonpipe, folder, "before", os.path.abspath(FIXTURE), 1, 0)
        good = compare("before training", observed_logits(before), transformers_logits(checkpoint(before)))
        trained = checkpoint(train(moonpipe, folder, "five-steps", os.path.abspath(FIXTURE), 5, "1e-3"))
        after = train(moonpipe, folder, "after", trained, 1, 0)
        good &= compare("after five steps", observed_logits(after), transformers_logits(trained))
        moved = (observed_logits(before) - observed_logits(after)).abs().max().item()
        print(f"five steps moved the logits by up to {moved:.2e}")
        sys.exit(0 if good and moved > 10 * TOLERANCE else 1)


if __name__ == "__main__":
    main()
