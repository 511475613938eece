#!/usr/bin/env python3
"""Writes the PrometheusRule of deploy/kustomize/components/monitoring from rules.yaml and alerts.yaml. Run after changing them."""
import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
TARGET = os.path.join(FOLDER, "..", "kustomize", "components", "monitoring", "prometheus-rule.yaml")
HEAD = """# Written by deploy/prometheus/wrap_rules.py from rules.yaml and alerts.yaml; change those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: moonpipe
  labels:
    app.kubernetes.io/part-of: moonpipe
spec:
  groups:
"""


def groups(name):
    with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
        body = file.read().split("\ngroups:\n", 1)[1]
    return "".join("  " + line if line.strip() else line for line in body.splitlines(keepends=True))


with open(TARGET, "w", encoding="utf-8") as target:
    target.write(HEAD + groups("rules.yaml") + groups("alerts.yaml"))
