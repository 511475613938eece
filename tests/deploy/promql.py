"""What a PromQL expression names, and what may be named: the metrics that services export, recorded rules, a few of others."""
import os
import re
import subprocess
import tempfile

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
PROMETHEUS = os.path.join(ROOT, "deploy", "prometheus")
# Labels that the scrape adds.
TARGET_LABELS = {"instance", "job", "namespace", "pod"}
KEYWORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset", "inf", "nan",
            "sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile", "stddev", "stdvar", "group", "count_values"}
SUFFIXES = {"counter": [""], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"], "summary": ["", "_sum", "_count"]}


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [line.split() for line in file if line.strip() and not line.startswith("#")]


def exported_metrics():
    """Name -> (type, labels) of deploy/prometheus/metrics.txt."""
    metrics = {}
    for name, kind, labels in read_lines(os.path.join(PROMETHEUS, "metrics.txt")):
        if name in metrics:
            raise ValueError(f"metrics.txt names {name} twice")
        metrics[name] = (kind, set() if labels == "-" else set(labels.split(",")))
    return metrics


def queryable_names():
    """Series name -> labels that an expression may name, or None where the labels are not checked."""
    names = {}
    for name, (kind, labels) in exported_metrics().items():
        for suffix in SUFFIXES[kind]:
            extra = {"le"} if suffix == "_bucket" else {"quantile"} if kind == "summary" and not suffix else set()
            names[name + suffix] = labels | TARGET_LABELS | extra
    for name, labels in read_lines(os.path.join(PROMETHEUS, "external-metrics.txt")):
        names[name] = set(labels.split(",")) | TARGET_LABELS
    with open(os.path.join(PROMETHEUS, "rules.yaml"), encoding="utf-8") as file:
        for name in re.findall(r"^\s*- record: (\S+)$", file.read(), re.MULTILINE):
            # The level says which labels are left.
            names[name] = set(name.split(":")[0].split("_")) | TARGET_LABELS
    return names


def selectors(expr):
    """(series name, label names of its matcher) for each selector of an expression that parses."""
    text = re.sub(r'"(?:\\.|[^"\\])*"', '""', expr)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    text = re.sub(r"\boffset\s+-?\w+", " ", text)
    found = []
    for match in re.finditer(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\s*(\(|\{[^}]*\})?", text):
        name, rest = match.group(1), match.group(2) or ""
        if rest == "(" or name.lower() in KEYWORDS:
            continue
        found.append((name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", rest))))
    # Matchers are removed above with their selector; one without a name would match any metric.
    if re.search(r"(^|[^\w:}\s])\s*\{", text):
        found.append(("{}", set()))
    return found


def problems(expr, names):
    """What is wrong with the names in an expression, as sentences."""
    wrong = []
    for name, labels in selectors(expr):
        if name not in names:
            wrong.append(f"no service exports {name}")
        elif labels - names[name]:
            wrong.append(f"{name} has no label {', '.join(sorted(labels - names[name]))}")
    return wrong


def syntax_error(promtool, expressions):
    """None if promtool parses every expression, else its words."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rules.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write("groups:\n- name: parsed\n  rules:\n")
            for index, expr in enumerate(expressions):
                file.write(f"  - record: parsed_{index}\n    expr: |2\n      " + expr.replace("\n", "\n      ") + "\n")
        result = subprocess.run([promtool, "check", "rules", path], capture_output=True, text=True, check=False)
        return None if result.returncode == 0 else result.stdout + result.stderr
