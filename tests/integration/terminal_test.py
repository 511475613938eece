#!/usr/bin/env python3
"""What `moonpipe train` shows: a plan first, plain lines into a file, a bar on a terminal, JSON alone where it is asked for."""
import json
import os
import pty
import re
import select
import subprocess
import tempfile
import time
import unittest

from cluster import PATIENCE, PROGRAMS, Case, Training, write_run_file

STEP = re.compile(r"step: +(\d+)/4  loss: +\d+\.\d{4}  grad_norm: +\d+\.\d{4}  tps: +[\d,]+  mfu: +(?:[\d.]+%|unknown)  memory: +[\d.]+GiB"
                  r"  bubble: +[\d.]+%  eta: \w+")


class Terminal(Case):
    def test_a_file_gets_the_plan_and_then_one_plain_line_a_step(self):
        with Training(steps=4, evaluate=True) as training:
            self.assertEqual(training.process.end(), 0, training.process.output())
            text = training.process.output()
            folder = training.folder
            with open(os.path.join(folder, "report.json"), encoding="utf-8") as file:
                report = json.load(file)
            for name in ("checkpoints", "metrics.jsonl", "trace.json", "logs", "report.json"):
                self.assertIn(os.path.join(folder, name), text)
                self.assertTrue(os.path.exists(os.path.join(folder, name)))
        self.assertNotIn("\x1b", text)
        self.assertNotIn("\r", text)
        lines = text.splitlines()
        self.assertEqual(lines[0], "run         tiny-run")
        first_step = next(i for i, line in enumerate(lines) if line.startswith("step: "))
        plan = "\n".join(lines[:first_step])
        for part in ("model       kimi_vl", "parameters  ", "step        4 microbatches, at most 1,024 tokens, schedule 1f1b; 4 steps", "peak        ",
                     "vision encoder", "decoder stage 0", "decoder stage 1", "layer 0", "GiB"):
            self.assertIn(part, plan)
        steps = [STEP.fullmatch(line) for line in lines if line.startswith("step: ")]
        self.assertNotIn(None, steps, text)
        self.assertEqual([int(step.group(1)) for step in steps], [1, 2, 3, 4])
        # The report's keys are what others read.
        self.assertEqual(list(report), ["steps", "training_seconds", "wall_seconds", "tokens_per_second", "images_per_second", "final_loss", "mfu",
                                        "heldout_one", "controls"])
        self.assertEqual(set(report["controls"]), {"zero-features"})

    def test_json_is_all_that_standard_output_gets(self):
        with tempfile.TemporaryDirectory(prefix="moonpipe-test-") as temp:
            folder = os.path.join(temp, "runs", "tiny-run")
            command = [os.path.join(PROGRAMS, "moonpipe"), "train", write_run_file(os.path.join(temp, "model"), steps=4), "--run-folder", folder,
                       "--log-format=json"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
            steps = [json.loads(line) for line in result.stdout.splitlines()]
            self.assertEqual([step["step"] for step in steps], [1, 2, 3, 4])
            for key in ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "mfu", "bubble_ratio", "eta_seconds", "peak_memory_bytes"):
                self.assertIn(key, steps[0])
            for name in os.listdir(os.path.join(folder, "logs")):
                with open(os.path.join(folder, "logs", name), encoding="utf-8") as file:
                    for line in file:
                        json.loads(line)
            # A finished run says so, and takes no step.
            again = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            self.assertEqual((again.returncode, again.stdout), (0, ""))
            self.assertIn("has finished: 4 of 4 steps are taken", again.stderr)

    def test_a_terminal_gets_a_bar_below_the_lines(self):
        with tempfile.TemporaryDirectory(prefix="moonpipe-test-") as temp:
            ours, theirs = pty.openpty()
            process = subprocess.Popen([os.path.join(PROGRAMS, "moonpipe"), "train", write_run_file(os.path.join(temp, "model"), steps=4),
                                        "--run-folder", os.path.join(temp, "runs", "tiny-run")], stdout=theirs, stderr=theirs, stdin=theirs)
            os.close(theirs)
            text, end = b"", time.monotonic() + PATIENCE
            try:
                while time.monotonic() < end:
                    if not select.select([ours], [], [], 1)[0]:
                        continue
                    try:
                        part = os.read(ours, 65536)
                    except OSError:  # How Linux says that the other end is closed.
                        break
                    if not part:
                        break
                    text += part
                self.assertEqual(process.wait(10), 0, text.decode())
            finally:
                process.kill()
                os.close(ours)
        shown = text.decode()
        bars = re.findall(r"(\d+)% \|(=*>? *)\| (\d)/4  loss [\d.]+  eta \w+", shown)
        self.assertEqual([(int(percent), step) for percent, _, step in bars], [(25, "1"), (50, "2"), (75, "3"), (100, "4")])
        lengths = [cells.count("=") for _, cells, _ in bars]
        self.assertEqual(lengths, sorted(set(lengths)))
        # Each bar is erased before the next line, so what stays is what a file would get.
        stays = re.sub(r"[^\n]*\r\x1b\[K", "", shown)
        self.assertNotIn("|=", stays)
        self.assertEqual(len(STEP.findall(stays)), 4)


if __name__ == "__main__":
    unittest.main()
