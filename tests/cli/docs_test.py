#!/usr/bin/env python3
"""What docs/models says is true: every run file is accepted, every command runs, every number of parameters is the plan's."""
import glob
import json
import os
import re
import shlex
import subprocess
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
MOONPIPE = os.path.join(os.environ["MOONPIPE_PROGRAMS"], "moonpipe")
PAGES = sorted(glob.glob(os.path.join(ROOT, "docs", "models", "*.md")))


def run(*arguments):
    return subprocess.run([MOONPIPE, *arguments], capture_output=True, text=True, timeout=60, check=False)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Models(unittest.TestCase):
    def test_every_run_file_is_accepted(self):
        found = 0
        with tempfile.TemporaryDirectory(prefix="moonpipe-test-") as folder:
            for page in PAGES:
                with open(page, encoding="utf-8") as file:
                    text = file.read()
                for i, block in enumerate(blocks(text, "yaml")):
                    path = os.path.join(folder, "run.yaml")
                    with open(path, "w", encoding="utf-8") as file:
                        file.write(block)
                    result = run("config", "show", path)
                    self.assertEqual(result.returncode, 0, f"{page}, block {i}: {result.stderr}")
                    # A field that is named is kept.
                    self.assertIn("learning_rate", result.stdout)
                    found += 1
        self.assertGreaterEqual(found, 7)

    def test_every_command_runs(self):
        found = 0
        for page in PAGES:
            with open(page, encoding="utf-8") as file:
                text = file.read()
            for line in "".join(blocks(text, "sh")).splitlines():
                words = shlex.split(line)
                self.assertEqual(words[0], "moonpipe", line)
                result = run(*words[1:])
                self.assertEqual(result.returncode, 0, f"{page}: {line}: {result.stderr}")
                found += 1
        self.assertGreaterEqual(found, 6)

    def test_every_flavour_has_a_page_with_its_numbers(self):
        for flavour, page in (("kimi-vl-a3b", "kimi-vl-a3b.md"), ("moonlight-16b-a3b", "moonlight-16b-a3b.md"), ("kimi-k2.5", "kimi-k2.5.md")):
            plan = run("plan", "--model", flavour, "--format", "json")
            self.assertEqual(plan.returncode, 0, plan.stderr)
            counts = json.loads(plan.stdout)["parameters"]
            with open(os.path.join(ROOT, "docs", "models", page), encoding="utf-8") as file:
                text = file.read()
            with open(os.path.join(ROOT, "docs", "models", "README.md"), encoding="utf-8") as file:
                table = next(line for line in file if page in line)
            names = ["decoder", "active_per_token_without_embedding"] + (["vision", "projector"] if counts["vision"] else ["active_per_token"])
            if flavour == "kimi-vl-a3b":
                names.remove("active_per_token_without_embedding")
            for name in names:
                self.assertIn(f"{counts[name]:,}", text, f"{page} says another number of {name}")
            for name in ("total", "active_per_token"):
                self.assertIn(f"{counts[name]:,}", table)


if __name__ == "__main__":
    unittest.main()
