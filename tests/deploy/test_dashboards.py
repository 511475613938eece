#!/usr/bin/env python3
"""Tests of check_dashboards.py and promql.py: what they must refuse. Exit code 77 where promtool is absent."""
import copy
import json
import os
import shutil
import sys
import unittest

import check_dashboards
import promql

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


class Selectors(unittest.TestCase):
    def test_finds_names_and_labels_and_nothing_else(self):
        expr = ('sum without (instance, pod) (rate(moonpipe_a_total{run=~"x{}", kind!="padding"}[5m] offset 5m)) '
                '/ on (run) group_left () run:b:rate1m > bool 0.5 or abs(c) == Inf and label_replace(d, "e", "$1", "f", "(.*)")')
        self.assertEqual(promql.selectors(expr),
                         [("moonpipe_a_total", {"run", "kind"}), ("run:b:rate1m", set()), ("c", set()), ("d", set())])

    def test_refuses_a_selector_without_a_name(self):
        self.assertTrue(promql.problems('rate({run="a"}[1m])', promql.queryable_names()))

    def test_knows_the_series_of_a_histogram(self):
        names = promql.queryable_names()
        self.assertEqual(promql.problems('moonpipe_train_step_duration_seconds_bucket{le="1"}', names), [])
        self.assertTrue(promql.problems("moonpipe_train_step_duration_seconds", names))
        self.assertTrue(promql.problems('moonpipe_train_loss{le="1"}', names))


class Dashboards(unittest.TestCase):
    def setUp(self):
        path = os.path.join(promql.ROOT, "deploy", "grafana", "dashboards", "training.json")
        with open(path, encoding="utf-8") as file:
            self.good = json.load(file)
        self.names = promql.queryable_names()

    def problems(self, change):
        broken = copy.deepcopy(self.good)
        change(broken, [panel for panel in broken["panels"] if panel["type"] != "row"])
        return "\n".join(check_dashboards.check(broken, PROMTOOL, self.names))

    def test_accepts_the_dashboard_as_it_is(self):
        self.assertEqual(self.problems(lambda board, panels: None), "")

    def test_refuses_a_metric_that_no_service_exports(self):
        def change(board, panels):
            panels[0]["targets"][0]["expr"] = 'moonpipe_train_lost{run=~"$run"}'
        self.assertIn("no service exports moonpipe_train_lost", self.problems(change))

    def test_refuses_a_label_that_the_metric_lacks(self):
        def change(board, panels):
            panels[0]["targets"][0]["expr"] = 'moonpipe_train_loss{stage=~"$stage"}'
        self.assertIn("moonpipe_train_loss has no label stage", self.problems(change))

    def test_refuses_an_expression_that_does_not_parse(self):
        def change(board, panels):
            panels[0]["targets"][0]["expr"] = "sum(moonpipe_train_loss"
        self.assertIn("promtool", self.problems(change))

    def test_refuses_an_unknown_variable_a_data_source_and_an_overlap(self):
        def change(board, panels):
            panels[0]["targets"][0]["expr"] = 'moonpipe_train_loss{run=~"$job_name"}'
            panels[1]["datasource"]["uid"] = "abc"
            panels[2]["gridPos"] = panels[3]["gridPos"]
        text = self.problems(change)
        self.assertIn("unknown variable job_name", text)
        self.assertIn("data source of its own", text)
        self.assertIn("overlaps", text)

    def test_shows_what_a_person_looks_for(self):
        shown = set()
        for name in ("training", "pipeline", "services"):
            path = os.path.join(promql.ROOT, "deploy", "grafana", "dashboards", name + ".json")
            with open(path, encoding="utf-8") as file:
                for _, expr in check_dashboards.expressions(json.load(file)):
                    shown |= {found for found, _ in promql.selectors(check_dashboards.substitute(expr))}
        for name in ("moonpipe_train_loss", "moonpipe_train_grad_norm", "moonpipe_train_learning_rate", "run_kind:moonpipe_train_tokens:rate1m",
                     "run:moonpipe_train_images:rate1m", "run:moonpipe_train_model_flops_per_peak_flops:ratio_rate1m",
                     "run:moonpipe_train_step_duration_seconds:p50_rate5m", "run_stage:moonpipe_stage_bubble:ratio_rate1m",
                     "run_stage_phase:moonpipe_stage_phase_seconds:ratio_rate1m", "moonpipe_stage_activation_bytes_total",
                     "moonpipe_vision_feature_bytes_total", "run:moonpipe_dataloader_wait:max_rate5m",
                     "moonpipe_checkpoint_last_success_timestamp_seconds", "moonpipe_train_skipped_steps_total", "up"):
            self.assertIn(name, shown)

    def test_every_exported_metric_is_seen_somewhere(self):
        text = ""
        for folder, suffix in (("prometheus", ".yaml"), ("grafana/dashboards", ".json")):
            folder = os.path.join(promql.ROOT, "deploy", folder)
            for name in os.listdir(folder):
                if name.endswith(suffix):
                    with open(os.path.join(folder, name), encoding="utf-8") as file:
                        text += file.read()
        unseen = [name for name in promql.exported_metrics() if name.startswith("moonpipe_") and name not in text]
        self.assertEqual(unseen, [])


if __name__ == "__main__":
    if not PROMTOOL:
        print("skipped: promtool is absent (Debian package prometheus)")
        sys.exit(77)
    unittest.main()
