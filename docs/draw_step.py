#!/usr/bin/env python3
"""Draws one step of a run's trace as an SVG: docs/draw_step.py RUN/trace.json [STEP] > docs/step.svg"""
import json
import sys

COLOURS = {"F": "#4c8dd6", "B": "#e08a3c", "wait": "#e6e6e6", "send": "#9a9a9a"}
LEFT, WIDTH, ROW, GAP = 130, 820, 34, 12


def kind(name):
    code = name.lstrip("V0123456789").rstrip("0123456789")
    if code in ("F", "B"):
        return code
    return "wait" if code.startswith("R") and code != "RP" else "send"


def main(path, step=None):
    trace = json.load(open(path))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace
             if e["ph"] == "M" and e["name"] == "thread_name" and e["args"]["name"] != "coordinator"}
    spans = [e for e in trace if e["ph"] == "X" and e["tid"] in names]
    step = int(step) if step else max(e["args"]["step"] for e in spans)
    spans = [e for e in spans if e["args"]["step"] == step]
    begin = min(e["ts"] for e in spans)
    end = max(e["ts"] + e["dur"] for e in spans)
    scale = WIDTH / (end - begin)
    order = sorted(names, key=lambda tid: (not names[tid].startswith("vision"), names[tid]))
    height = len(order) * (ROW + GAP) + 46
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>']
    for number, tid in enumerate(order):
        y = 10 + number * (ROW + GAP)
        out.append(f'<text x="8" y="{y + ROW / 2 + 4}">{names[tid].split(" (")[0]}</text>')
        for span in (e for e in spans if e["tid"] == tid):
            x, width = LEFT + (span["ts"] - begin) * scale, max(span["dur"] * scale, 0.5)
            what = kind(span["name"])
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{COLOURS[what]}"/>')
            if what in "FB" and width > 14:
                label = what + span["name"].lstrip("V0123456789")[1:]
                out.append(f'<text x="{x + width / 2:.1f}" y="{y + ROW / 2 + 4}" text-anchor="middle" fill="white">{label}</text>')
    y = height - 14
    for number, (what, text) in enumerate([("F", "forward"), ("B", "backward"), ("wait", "waiting")]):
        x = LEFT + number * 110
        out.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{COLOURS[what]}"/><text x="{x + 20}" y="{y}">{text}</text>')
    out.append(f'<text x="{LEFT + WIDTH}" y="{y}" text-anchor="end">step {step}: {(end - begin) / 1000:.0f} ms</text></svg>')
    print("\n".join(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
