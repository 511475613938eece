#!/usr/bin/env python3
"""Tests of deploy/prometheus. Exit code 77 where promtool or PyYAML is absent."""
import copy
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import promql

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
try:
    import yaml
except ImportError:
    yaml = None
FOLDER = promql.PROMETHEUS


def load(name):
    with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
        return yaml.safe_load(file)


def rules(name):
    return [rule for group in load(name)["groups"] for rule in group["rules"]]


def promtool(*arguments):
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, check=False)


class Metrics(unittest.TestCase):
    def test_names_follow_the_conventions(self):
        for name, (kind, labels) in promql.exported_metrics().items():
            with self.subTest(name):
                self.assertIn(kind, promql.SUFFIXES)
                self.assertRegex(name, r"^(moonpipe|exposer)_[a-z_]+$")
                if name.startswith("moonpipe_"):
                    self.assertEqual(kind == "counter", name.endswith("_total"), "counters and only they end in _total")
                self.assertFalse(labels & {"step", "file", "request", "image", "le", "instance", "job"}, "labels of small cardinality")

    def test_every_metric_is_listed_once_and_in_order(self):
        names = [line[0] for line in promql.read_lines(os.path.join(FOLDER, "metrics.txt")) if line[0].startswith("moonpipe_")]
        self.assertEqual(names, sorted(set(names)))


class Rules(unittest.TestCase):
    def test_promtool_accepts_the_rules(self):
        result = promtool("check", "rules", os.path.join(FOLDER, "rules.yaml"), os.path.join(FOLDER, "alerts.yaml"))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_expressions_name_only_what_exists(self):
        names = promql.queryable_names()
        for rule in rules("rules.yaml") + rules("alerts.yaml"):
            self.assertEqual(promql.problems(rule["expr"], names), [], rule)

    def test_names_of_recorded_rules_have_level_metric_and_operations(self):
        for rule in rules("rules.yaml"):
            self.assertRegex(rule["record"], r"^run(_[a-z]+)*:moonpipe_[a-z_]+:[a-z0-9_]+$")
            self.assertNotIn("_total", rule["record"])

    def test_recorded_rules_do_not_split_a_run_by_the_service_that_was_scraped(self):
        for rule in rules("rules.yaml"):
            for dropped in re.findall(r"without \(([^)]*)\)", rule["expr"]):
                self.assertLessEqual({"instance", "pod", "job"}, set(re.split(r",\s*", dropped)), rule["record"])

    def test_the_asked_alerts_exist_with_a_summary_and_a_severity(self):
        alerts = rules("alerts.yaml")
        self.assertEqual({rule["alert"] for rule in alerts}, {"Moonpipe" + name for name in (
            "TrainStalled", "LossNotFinite", "LossSpike", "GradNormHigh", "MfuDropped", "BubbleHigh", "StageDown",
            "DataloaderStarving", "CheckpointTooOld", "CommErrors", "XidErrors", "MemoryNearLimit")})
        for rule in alerts:
            self.assertIn(rule["labels"]["severity"], ("warning", "critical"))
            self.assertTrue(rule["annotations"]["summary"])

    def test_operations_explain_every_alert(self):
        with open(os.path.join(promql.ROOT, "docs", "operations.md"), encoding="utf-8") as file:
            text = file.read()
        for rule in rules("alerts.yaml"):
            self.assertIn(f"`{rule['alert']}`", text)

    def test_promtool_passes_the_cases(self):
        result = promtool("test", "rules", *sorted(glob.glob(os.path.join(FOLDER, "tests", "*.yaml"))))
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_every_alert_has_a_case_that_fires_and_one_that_does_not(self):
        fires, silent = {}, set()
        for case in load("tests/alerts_test.yaml")["tests"]:
            for check in case["alert_rule_test"]:
                if check["exp_alerts"]:
                    fires.setdefault(check["alertname"], 0)
                    fires[check["alertname"]] = max(fires[check["alertname"]], len(check["exp_alerts"]))
                else:
                    silent.add(check["alertname"])
        alerts = [rule["alert"] for rule in rules("alerts.yaml")]
        for alert in alerts:
            self.assertIn(alert, silent)
            self.assertGreaterEqual(fires.get(alert, 0), alerts.count(alert), alert)

    def test_every_recorded_rule_has_a_case_with_a_value_and_one_without(self):
        with_value, without = set(), set()
        for case in load("tests/rules_test.yaml")["tests"]:
            for check in case["promql_expr_test"]:
                (without if not check["exp_samples"] else with_value).update(re.findall(r"run\w*:\w+:\w+", check["expr"]))
        recorded = {rule["record"] for rule in rules("rules.yaml")}
        self.assertEqual(recorded - with_value, set())
        self.assertEqual(recorded - without, set())

    def test_a_broken_rule_fails_its_case(self):
        broken = load("rules.yaml")
        for group in broken["groups"]:
            for rule in group["rules"]:
                if rule["record"] == "run:moonpipe_train_tokens:rate1m":
                    rule["expr"] = rule["expr"].replace('{kind!="padding"}', "")
        with tempfile.TemporaryDirectory() as folder:
            os.mkdir(os.path.join(folder, "tests"))
            with open(os.path.join(folder, "rules.yaml"), "w", encoding="utf-8") as file:
                yaml.safe_dump(broken, file)
            shutil.copy(os.path.join(FOLDER, "tests", "rules_test.yaml"), os.path.join(folder, "tests"))
            result = promtool("test", "rules", os.path.join(folder, "tests", "rules_test.yaml"))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("run:moonpipe_train_tokens:rate1m", result.stdout + result.stderr)


class Scraping(unittest.TestCase):
    def check(self, config):
        with tempfile.TemporaryDirectory() as folder:
            for name in config["rule_files"]:
                shutil.copy(os.path.join(FOLDER, name), folder)
            path = os.path.join(folder, "prometheus.yaml")
            with open(path, "w", encoding="utf-8") as file:
                yaml.safe_dump(config, file)
            result = promtool("check", "config", path)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        jobs = [job["job_name"] for job in config["scrape_configs"]]
        self.assertEqual(jobs, ["moonpipe"], "alerts look for this job")

    def test_promtool_accepts_the_static_configuration(self):
        self.check(load("prometheus.yaml"))

    def test_promtool_accepts_the_kubernetes_configuration(self):
        # Debian's promtool is built without the discovery of Kubernetes, so that part is checked by hand.
        config = copy.deepcopy(load("prometheus-kubernetes.yaml"))
        job = config["scrape_configs"][0]
        self.assertEqual(job.pop("kubernetes_sd_configs"), [{"role": "pod"}])
        job["static_configs"] = [{"targets": ["127.0.0.1:9464"]}]
        self.check(config)
        added = {rule["target_label"] for rule in job["relabel_configs"] if "target_label" in rule}
        self.assertEqual(added, {"namespace", "pod"}, "another label would split the sums of the recorded rules")


if __name__ == "__main__":
    if not PROMTOOL or not yaml:
        print("skipped:", "promtool is absent (Debian package prometheus)" if not PROMTOOL else "PyYAML is absent")
        sys.exit(77)
    unittest.main()
