#!/usr/bin/env python3
"""`moonpipe plan` counts what a count by hand gives, to the last FLOP, on random models and batches."""
import json
import os
import random
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import flops_by_hand  # noqa: E402

PROGRAMS = os.environ["MOONPIPE_PROGRAMS"]
FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures")


def random_batch(rng, sees, frames):
    batch = []
    for _ in range(rng.randint(1, 6)):
        pictures = []
        if sees:
            for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
                pictures.append((rng.randint(1, frames), 2 * rng.randint(1, 40), 2 * rng.randint(1, 40)))
        longest = rng.choice([50, 5000, 100000])
        documents = [rng.randint(1, longest) for _ in range(rng.randint(1, 7))]
        documents.append(sum(rows * columns // 4 for _, rows, columns in pictures) + 1)
        batch.append({"documents": documents, "pictures": pictures})
    return batch


def manifest_of(batch):
    return {"microbatches": [
        {"index": i, "tokens": sum(one["documents"]), "document_lengths": one["documents"],
         "grids": [{"frames": f, "rows": r, "columns": c} for f, r, c in one["pictures"]],
         "feature_rows": sum(r * c // 4 for _, r, c in one["pictures"])} for i, one in enumerate(batch)]}


def random_config(rng):
    """A fixture's configuration with other sizes."""
    name = rng.choice(["kimi_vl_a3b", "moonlight", "kimi_k2_5"])
    with open(os.path.join(FIXTURES, name, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    text = config.get("text_config", config)
    # As large as K2.5: a step of such a model is beyond 2^53.
    scale = rng.choice([1, 1, 16, 112])
    text.update(hidden_size=64 * scale, num_hidden_layers=rng.randint(2, 61), first_k_dense_replace=rng.randint(0, 2),
                vocab_size=rng.randint(600, 163840), num_experts_per_tok=rng.randint(1, 8), n_shared_experts=rng.randint(0, 2),
                moe_intermediate_size=rng.randint(8, 2048), intermediate_size=rng.randint(8, 18432), kv_lora_rank=rng.randint(8, 512),
                q_lora_rank=rng.choice([None, 24, 1536]), moe_layer_freq=rng.choice([1, 1, 2]))
    text["num_attention_heads"] = text["num_key_value_heads"] = rng.randint(1, 64)
    if "vision_config" in config:
        vision = config["vision_config"]
        prefix = "vt_" if "vt_hidden_size" in vision else ""
        heads = rng.randint(1, 16)
        vision.update({prefix + "num_attention_heads": heads, prefix + "hidden_size": heads * 4 * rng.randint(1, 18),
                       prefix + "num_hidden_layers": rng.randint(1, 27), prefix + "intermediate_size": rng.randint(8, 4304)})
        if "mm_hidden_size" in vision:
            vision["mm_hidden_size"] = vision["vt_hidden_size"]
            vision["text_hidden_size"] = text["hidden_size"]
    return config


class Flops(unittest.TestCase):
    def count(self, folder, model, batch, *arguments):
        path = os.path.join(folder, "step.json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(manifest_of(batch), file)
        result = subprocess.run([os.path.join(PROGRAMS, "moonpipe"), "plan", "--model", model, "--manifest", path, "--stages", "2",
                                 "--format", "json", *arguments], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)["flops_per_step"]

    def test_50_random_batches_are_counted_exactly(self):
        rng = random.Random(20261201)
        beyond_double = 0
        with tempfile.TemporaryDirectory(prefix="moonpipe-test-") as folder:
            for i in range(50):
                config = random_config(rng)
                model = os.path.join(folder, "config.json")
                with open(model, "w", encoding="utf-8") as file:
                    json.dump(config, file)
                sees = "vision_config" in config
                batch = random_batch(rng, sees, config["vision_config"].get("init_pos_emb_time", 1) if sees else 1)
                frozen = [part for part in ("vision", "projector", "decoder") if rng.random() < 0.25 and (sees or part == "decoder")]
                arguments = []
                if frozen:
                    groups = ", ".join(f"{{match: {part}, frozen: true}}" for part in frozen)
                    arguments = ["--set", f"optimizer.groups=[{groups}]"]
                expected = flops_by_hand.training_flops(config, batch, frozen)
                beyond_double += expected["total"] > 2 ** 53
                self.assertEqual(self.count(folder, model, batch, *arguments), expected, f"batch {i}, frozen {frozen}\n{config}\n{batch}")
        self.assertGreater(beyond_double, 5)

    def test_three_jobs_of_the_small_model(self):
        """64 tokens: text alone, a picture of 4x4 patches, one of 8x8."""
        with open(os.path.join(FIXTURES, "kimi_vl_a3b", "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config["text_config"].update(hidden_size=64)
        config["vision_config"].update(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
        with tempfile.TemporaryDirectory(prefix="moonpipe-test-") as folder:
            model = os.path.join(folder, "config.json")
            with open(model, "w", encoding="utf-8") as file:
                json.dump(config, file)
            jobs = [self.count(folder, model, [{"documents": [64], "pictures": pictures}])
                    for pictures in ([], [(1, 4, 4)], [(1, 8, 8)])]
        self.assertEqual([jobs[0]["vision"], jobs[0]["projector"]], [0, 0])
        self.assertEqual(jobs[1]["vision"], 3379200 + 196608)
        self.assertEqual(jobs[1]["projector"], 589824)
        self.assertEqual(jobs[1]["total"] - jobs[0]["total"], 4165632)
        self.assertEqual(jobs[2]["total"] - jobs[0]["total"], 19021824)


if __name__ == "__main__":
    unittest.main()
