#!/usr/bin/env python3
"""trace.json of a run with eight microbatches: a row a service, everybody busy at once, and the order of 1F1B."""
import json
import os
import re
import unittest

from cluster import Case, Training

STAGES = ["decoder stage 0", "decoder stage 1"]
SERVICES = STAGES + ["vision encoder"]
MICROBATCHES = 8


def overlap(*rows):
    """Microseconds in which every row has an open span."""
    events = sorted((edge, change) for spans in rows for begin, end in spans for edge, change in ((begin, 1), (end, -1)))
    open_spans, since, together = 0, None, 0
    for at, change in events:
        if open_spans == len(rows):
            together += at - since
        open_spans += change
        since = at
    return together


class Trace(Case):
    @classmethod
    def setUpClass(cls):
        # Wide enough that a microbatch takes longer than the noise of the machine.
        with Training(steps=6, microbatches=MICROBATCHES, more={"pipeline": {"microbatch_tokens": 512}}) as training:
            assert training.process.end() == 0, training.process.output()
            with open(os.path.join(training.folder, "trace.json"), encoding="utf-8") as file:
                cls.events = json.load(file)["traceEvents"]
        cls.rows = {event["tid"]: event["args"]["name"] for event in cls.events if event["name"] == "thread_name"}
        cls.spans = [{**event, "row": cls.rows[event["tid"]]} for event in cls.events if event["ph"] == "X"]

    def of(self, row, step, category="compute"):
        return sorted((s for s in self.spans if s["row"] == row and s["args"]["step"] == step and s["cat"] == category), key=lambda s: s["ts"])

    def steps(self):
        return sorted({span["args"]["step"] for span in self.spans})

    def test_there_is_one_row_a_service(self):
        self.assertEqual(sorted(self.rows.values()), ["coordinator", *SERVICES])
        order = {e["tid"]: e["args"]["sort_index"] for e in self.events if e["name"] == "thread_sort_index"}
        self.assertEqual([self.rows[tid] for tid in sorted(order, key=order.get)], ["coordinator", "vision encoder", *STAGES])
        self.assertEqual(self.steps(), [4, 5, 6])

    def test_both_stages_and_the_encoder_are_busy_at_once(self):
        together = [overlap(*([(s["ts"], s["ts"] + s["dur"]) for s in self.of(row, step)] for row in SERVICES)) for step in self.steps()]
        self.assertGreater(max(together), 0)
        stages = [overlap(*([(s["ts"], s["ts"] + s["dur"]) for s in self.of(row, step)] for row in STAGES)) for step in self.steps()]
        self.assertGreater(min(stages), 0)

    def test_stages_follow_1f1b(self):
        for step in self.steps():
            for stage, warm_up in ((0, 1), (1, 0)):
                names = [s["name"] for s in self.of(STAGES[stage], step)]
                kinds = "".join(re.fullmatch(rf"{stage}([FB])(\d+)", name).group(1) for name in names)
                steady = MICROBATCHES - warm_up
                self.assertEqual(kinds, "F" * warm_up + "FB" * steady + "B" * warm_up, f"stage {stage}, step {step}")
                for kind in "FB":
                    order = [int(name[2:]) for name in names if name[1] == kind]
                    self.assertEqual(order, list(range(MICROBATCHES)))

    def test_spans_of_a_row_do_not_overlap_and_lie_in_their_step(self):
        for step in self.steps():
            (whole,) = self.of("coordinator", step, "step")
            for row in SERVICES:
                spans = sorted((s for s in self.spans if s["row"] == row and s["args"]["step"] == step), key=lambda s: s["ts"])
                for before, after in zip(spans, spans[1:]):
                    self.assertLessEqual(before["ts"] + before["dur"], after["ts"])
                # Clocks of one machine: only the offset's own error, which is the age of a heartbeat, remains.
                self.assertGreaterEqual(spans[0]["ts"], whole["ts"] - 5000)
                self.assertLessEqual(spans[-1]["ts"] + spans[-1]["dur"], whole["ts"] + whole["dur"] + 5000)

    def test_a_stage_sends_after_it_computes(self):
        for step in self.steps():
            forward = {s["name"]: s["ts"] + s["dur"] for s in self.of(STAGES[0], step)}
            backward = {s["name"]: s["ts"] for s in self.of(STAGES[1], step)}
            for microbatch in range(MICROBATCHES):
                self.assertLessEqual(forward[f"0F{microbatch}"], backward[f"1F{microbatch}"] + 5000)


if __name__ == "__main__":
    unittest.main()
