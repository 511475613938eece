#!/usr/bin/env python3
"""Checks Grafana dashboards: every expression parses and names only metrics and labels that exist.

usage: check_dashboards.py [--promtool PATH] [DASHBOARD.json...]   (default: all of deploy/grafana/dashboards)
Exit code 1 with one line per problem; 77 where promtool is absent (names are checked all the same).
"""
import argparse
import glob
import json
import os
import re
import shutil
import sys

import promql

DATASOURCE = "${DS_PROMETHEUS}"


def expressions(dashboard):
    """(where, expression) of every query, variables of the dashboard included."""
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            query = variable["query"]["query"]
            match = re.fullmatch(r"label_values\((.*), \w+\)", query)
            yield f"variable {variable['name']}", match.group(1) if match else query
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']!r}", target["expr"]


def substitute(expr):
    """Puts in what Grafana would: a pattern for a variable, a duration for an interval."""
    return re.sub(r"\$\{?\w+\}?", ".*", re.sub(r"\$__(?:rate_)?interval\b", "1m", expr))


def shape_problems(dashboard):
    """What other than the expressions is wrong."""
    if dashboard.get("schemaVersion") != 39:
        yield f"schemaVersion is {dashboard.get('schemaVersion')}, not 39"
    if not re.fullmatch(r"moonpipe-[a-z]+", dashboard.get("uid") or ""):
        yield f"uid {dashboard.get('uid')!r} is not moonpipe-NAME: links would break"
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    for name in {"DS_PROMETHEUS", "run", "stage"} - variables:
        yield f"variable {name} is missing"
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(ids) != len(set(ids)):
        yield "two panels have one id"
    cells = set()
    for panel in dashboard["panels"]:
        where = panel["gridPos"]
        mine = {(x, y) for x in range(where["x"], where["x"] + where["w"]) for y in range(where["y"], where["y"] + where["h"])}
        if where["x"] + where["w"] > 24 or cells & mine:
            yield f"panel {panel['title']!r} overlaps another or leaves the grid"
        cells |= mine
        if panel["type"] == "row":
            continue
        for part in [panel] + panel["targets"]:
            if part.get("datasource", {}).get("uid") != DATASOURCE:
                yield f"panel {panel['title']!r} has a data source of its own"
    for _, expr in expressions(dashboard):
        for name in set(re.findall(r"\$\{?(\w+)\}?", expr)) - variables - {"__rate_interval", "__interval"}:
            yield f"{expr!r} uses an unknown variable {name}"


def check(dashboard, promtool, names):
    """All problems of one dashboard."""
    found = list(shape_problems(dashboard))
    substituted = []
    for where, expr in expressions(dashboard):
        text = substitute(expr)
        substituted.append(text)
        found += [f"{where}: {problem} in {expr}" for problem in promql.problems(text, names)]
    if promtool:
        error = promql.syntax_error(promtool, substituted)
        if error:
            found.append(f"promtool: {error}")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--promtool", default=shutil.which("promtool"))
    parser.add_argument("dashboards", nargs="*")
    arguments = parser.parse_args()
    paths = arguments.dashboards or sorted(glob.glob(os.path.join(promql.ROOT, "deploy", "grafana", "dashboards", "*.json")))
    names = promql.queryable_names()
    failed = not paths
    uids = {}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            dashboard = json.load(file)
        found = check(dashboard, arguments.promtool, names)
        if dashboard["uid"] in uids:
            found.append(f"uid {dashboard['uid']} is also that of {uids[dashboard['uid']]}")
        uids[dashboard["uid"]] = path
        for problem in found:
            print(f"{path}: {problem}")
        failed = failed or bool(found)
        print(f"{os.path.basename(path)}: {len(list(expressions(dashboard)))} expressions, {len(found)} problems")
    if failed:
        return 1
    if not arguments.promtool:
        print("skipped: promtool is absent (Debian package prometheus), so the syntax was not checked")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
