#!/usr/bin/env python3
"""The metrics pages of a running cluster, and the real Prometheus that scrapes it. Exit code 77 where Prometheus is absent."""
import argparse
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

from cluster import ROOT, Case, Grpcurl, PROGRAMS, Process, Training, fetch, metrics_lines, wait_for

sys.path.insert(0, os.path.join(ROOT, "tests", "deploy"))
import promql  # noqa: E402

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
RULES = os.path.join(ROOT, "deploy", "prometheus")
SECONDS = 20
# Exported, but not by a cluster on CPUs whose run does well.
ABSENT_HERE = {
    "exposer_request_latencies": "only from the second scrape on",
}


def parse(page):
    """(types by name, labels that were seen by name, samples {(series, labels): value}) of a page."""
    types, labels, samples = {}, {}, {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            types[name] = kind
        elif line and not line.startswith("#"):
            series, text, value = re.match(r"(\w+)(?:\{(.*)\})? (\S+)$", line).groups()
            found = dict(re.findall(r'(\w+)="([^"]*)"', text or ""))
            family = next((series[:-len(end)] for end in ("_bucket", "_sum", "_count") if series.endswith(end) and series[:-len(end)] in types), series)
            labels.setdefault(family, set()).update(set(found) - {"le", "quantile"})
            samples[(series, tuple(sorted(found.items())))] = float(value)
    return types, labels, samples


def total(pages, series):
    return sum(value for _, _, samples in pages for (name, _), value in samples.items() if name == series)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Metrics(Case):
    @classmethod
    def setUpClass(cls):
        cls.training = cls.enterClassContext(Training(steps=1000000))
        cls.services = cls.training.services()
        cls.training.await_step(2)

    def moonpipe(self, *arguments):
        return subprocess.run([os.path.join(PROGRAMS, "moonpipe"), arguments[0], "--coordinator", self.training.coordinator(), *arguments[1:]],
                              capture_output=True, text=True, timeout=60, check=True).stdout

    def pages(self):
        return {service["name"]: fetch(service["metrics_address"]) for service in self.services}

    def test_1_services_json_lists_the_cluster(self):
        self.assertEqual([service["name"] for service in self.services],
                         ["coordinator", "dataloader", "vision-encoder", "decoder-stage-0", "decoder-stage-1"])
        for service in self.services:
            self.assertEqual(set(service), {"name", "role", "ordinal", "address", "metrics_address", "host", "pid"})
            with open(f"/proc/{service['pid']}/cmdline", encoding="utf-8") as file:
                self.assertIn("moonpipe-" + service["role"], file.read())
        self.assertEqual(self.services[0]["address"], self.training.coordinator())
        # The terminal tells where the pages are.
        for service in self.services:
            self.assertIn(f"http://{service['metrics_address']}/metrics", self.training.process.output())

    def test_2_pages_and_list_agree(self):
        listed = promql.exported_metrics()
        self.moonpipe("save", "tiny-run")
        self.pages()  # The page's own metrics show from the second scrape on.
        seen = {}
        for name, page in self.pages().items():
            types, labels, _ = parse(page)
            for metric, kind in types.items():
                self.assertIn(metric, listed, f"{name} exports it, deploy/prometheus/metrics.txt does not list it")
                self.assertEqual(kind, listed[metric][0], metric)
                self.assertEqual(labels.get(metric, set()), listed[metric][1], f"labels of {metric} of {name}")
                seen.setdefault(metric, []).append(name)
        self.assertEqual(set(listed) - set(seen) - set(ABSENT_HERE), set(), "listed and exported by nobody")

    def test_3_promtool_finds_nothing_to_mend(self):
        for name, page in self.pages().items():
            # The library's own metrics are not ours to name.
            ours = "".join(line + "\n" for line in page.splitlines() if "exposer_" not in line)
            result = subprocess.run([PROMTOOL, "check", "metrics"], input=ours, capture_output=True, text=True, check=False)
            self.assertEqual((result.returncode, result.stdout + result.stderr), (0, ""), name)

    def test_4_counters_that_alerts_watch_begin_at_zero(self):
        pages = {name: parse(page)[2] for name, page in self.pages().items()}
        for name, series, labels in (
                ("coordinator", "moonpipe_train_skipped_steps_total", {"reason": "not_finite"}),
                ("coordinator", "moonpipe_stage_restarts_total", {"reason": "restarted", "stage": "1"}),
                ("decoder-stage-0", "moonpipe_comm_errors_total", {"reason": "unavailable", "stage": "0"}),
                ("decoder-stage-1", "moonpipe_comm_aborts_total", {"stage": "1"}),
                ("vision-encoder", "moonpipe_comm_errors_total", {"reason": "data_loss", "stage": "vision"}),
                ("dataloader", "moonpipe_dataloader_denied_fetches_total", {})):
            self.assertEqual(pages[name].get((series, tuple(sorted({"run": "tiny-run", **labels}.items())))), 0, series)

    def test_5_prometheus_reads_loss_and_mfu(self):
        with tempfile.TemporaryDirectory(prefix="moonpipe-test-") as folder:
            config = os.path.join(folder, "prometheus.json")
            with open(config, "w", encoding="utf-8") as file:
                json.dump({"global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                           "rule_files": [os.path.join(RULES, "rules.yaml"), os.path.join(RULES, "alerts.yaml")],
                           "scrape_configs": [{"job_name": "moonpipe", "static_configs": [
                               {"targets": [service["metrics_address"] for service in self.services]}]}]}, file)
            port = free_port()
            prometheus = Process([PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
                                  f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"], os.path.join(folder, "prometheus.log"))

            def query(expr, at=None):
                text = urllib.parse.urlencode({"query": expr, **({"time": at} if at else {})})
                try:
                    answer = json.loads(fetch(f"127.0.0.1:{port}", "/api/v1/query?" + text))
                except OSError:
                    self.assertTrue(prometheus.running(), prometheus.output())
                    return []
                return answer["data"]["result"]

            def one(expr, at=None):
                result = query(expr, at)
                self.assertEqual(len(result), 1, f"{expr}: {result}\n{prometheus.output()}")
                return float(result[0]["value"][1])
            try:
                wait_for("all services are up", lambda: query("sum(up)") and one("sum(up)") == len(self.services))
                begin = time.time()
                # How many steps were taken at which second. Scraping takes its time; nothing here waits for anything else.
                taken = []
                while time.time() < begin + SECONDS:
                    taken.append((time.time(), len(self.training.lines())))
                    time.sleep(1)
                self.moonpipe("pause", "tiny-run")
                wait_for("the run is paused", lambda: "PAUSED" in self.moonpipe("status", "tiny-run"))
                end = time.time()
                lines = self.training.lines()
                # All have been scraped once more.
                wait_for("the last step is scraped", lambda: one("moonpipe_train_steps_total") == lines[-1]["step"])
                # A page gives 16 digits.
                self.assertTrue(math.isclose(one("moonpipe_train_loss"), lines[-1]["loss"], rel_tol=1e-15))
                self.assertTrue(math.isclose(one("moonpipe_train_grad_norm"), lines[-1]["grad_norm"], rel_tol=1e-15))
                self.assertEqual(one('sum(moonpipe_train_tokens_total)'), sum(line["tokens"] for line in lines))
                flops = sum(line["model_flops"] for line in lines)
                wait_for("the last commit is scraped", lambda: one("sum(moonpipe_train_model_flops_total)") == flops)
                self.assertEqual(one("sum(up)"), len(self.services))
                self.assertGreaterEqual(one(f"min(count_over_time(up[{round(end - begin)}s]))", end), 0.8 * (end - begin))
                # MFU by the rule: FLOPs of the last minute, or of what there is of it, over a minute and the sum of the measured peaks.
                mfu = one("run:moonpipe_train_model_flops_per_peak_flops:ratio_rate1m", end)
                peak = one("sum(moonpipe_train_device_peak_flops_per_second)")
                before = next(count for at, count in taken if at >= end - 60)
                by_lines = sum(line["model_flops"] for line in lines[before:]) / 60 / peak
                self.assertTrue(0.7 < mfu / by_lines < 1.4, f"{mfu} by Prometheus, {by_lines} by metrics.jsonl")
                last = lines[-1]
                self.assertTrue(math.isclose(last["mfu"], last["model_flops"] / last["seconds"] / peak, rel_tol=1e-9))
                self.assertEqual(query('ALERTS{alertstate="firing"}'), [])
            finally:
                prometheus.stop()
                self.moonpipe("resume", "tiny-run")

    def test_6_flops_of_the_workers_are_those_of_the_steps(self):
        self.moonpipe("pause", "tiny-run")
        wait_for("the run is paused", lambda: "PAUSED" in self.moonpipe("status", "tiny-run"))
        pages = [parse(page) for page in self.pages().values()]
        lines = self.training.lines()
        self.assertEqual(total(pages, "moonpipe_train_model_flops_total"), sum(line["model_flops"] for line in lines))
        # Two parts, each counted by who owns it.
        parts = {}
        for _, _, samples in pages:
            for (name, labels), value in samples.items():
                if name == "moonpipe_train_model_flops_total":
                    labels = dict(labels)
                    parts.setdefault(labels["part"], {})[labels["stage"]] = value
        self.assertEqual({part: sorted(stages) for part, stages in parts.items()}, {"decoder": ["0", "1"], "vision": ["vision"]})
        for part, stages in parts.items():
            self.assertTrue(all(value > 0 for value in stages.values()), (part, stages))
        self.assertEqual(total(pages, "moonpipe_train_images_total"), sum(line["images"] for line in lines))
        self.assertEqual(total(pages, "moonpipe_train_samples_total"), sum(line["samples"] for line in lines))
        # Every microbatch passed both stages once.
        for stage in ("0", "1"):
            key = ("moonpipe_stage_microbatches_total", (("mode", "train"), ("run", "tiny-run"), ("stage", stage)))
            self.assertEqual(sum(samples.get(key, 0) for _, _, samples in pages), 4 * len(lines))
        # What one end of an edge has sent, the other has received.
        ends = {}
        for _, _, samples in pages:
            for (series, labels), value in samples.items():
                if series == "moonpipe_stage_activation_bytes_total":
                    ends.setdefault(dict(labels)["edge"], {})[dict(labels)["direction"]] = value
        self.assertEqual(set(ends), {"features", "feature-gradient", "activation.0", "gradient.0"})
        for edge, bytes_by_direction in ends.items():
            self.assertGreater(bytes_by_direction["send"], 0, edge)
            self.assertEqual(bytes_by_direction["send"], bytes_by_direction["recv"], edge)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seconds", type=int, default=SECONDS)
    known, rest = arguments.parse_known_args()
    SECONDS = known.seconds
    if not PROMETHEUS or not PROMTOOL:
        print("skipped: prometheus or promtool is absent (Debian package prometheus)")
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *rest])
