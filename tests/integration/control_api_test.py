#!/usr/bin/env python3
"""Drives every method of ClusterService through reflection, as grpcurl does. Exit code 77 where grpcurl is absent."""
import os
import unittest

from cluster import Case, Grpcurl, Training, wait_for, tool

RUN = "trainingRuns/tiny-run"
CLUSTER = "moonpipe.cluster.v1.ClusterService/"


class ControlApi(Case):
    @classmethod
    def setUpClass(cls):
        # More steps than the test can wait for: it ends the run itself.
        cls.training = cls.enterClassContext(Training(steps=100000, more={"checkpoint": {"keep_last": 3}}))
        cls.address = cls.training.coordinator()
        cls.grpc = Grpcurl(cls.address)
        cls.methods = set()
        cls.training.await_step(1)

    @classmethod
    def call(cls, method, request):
        cls.methods.add(method)
        return cls.grpc.call(CLUSTER + method, request)

    def fails(self, method, request, code, reason):
        self.methods.add(method)
        actual, message, details = self.grpc.error(CLUSTER + method, request)
        self.assertEqual(actual, code, message)
        self.assertEqual(details["ErrorInfo"]["domain"], "moonpipe.dev")
        self.assertEqual(details["ErrorInfo"]["reason"], reason, message)
        return message, details

    def await_state(self, state):
        return wait_for(state, lambda: (lambda run: run if run["state"] == state else None)(self.call("GetTrainingRun", {"name": RUN})))

    def test_01_health_and_reflection_on_coordinator_and_dataloader(self):
        dataloader = next(s["address"] for s in self.training.services() if s["role"] == "dataloader")
        for address, service in ((self.address, "moonpipe.cluster.v1.ClusterService"), (dataloader, "moonpipe.data.v1.DataService")):
            grpc = Grpcurl(address)
            self.assertLessEqual({service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}, set(grpc.services()))
            for name in ("", service, "readiness", "liveness"):
                self.assertEqual(grpc.call("grpc.health.v1.Health/Check", {"service": name}), {"status": "SERVING"})
            self.assertEqual(grpc.stream("grpc.health.v1.Health/Watch", {"service": service}, seconds=1)[0], {"status": "SERVING"})
            self.assertEqual(grpc.error("grpc.health.v1.Health/Check", {"service": "nobody"})[0], "NotFound")

    def test_02_create_names_every_bad_field(self):
        good = self.call("GetTrainingRun", {"name": RUN})["spec"]
        bad = {**good, "pipeline": {**good["pipeline"], "schedule": "1f2b", "microbatches": 0}}
        message, details = self.fails("CreateTrainingRun", {"spec": bad, "training_run_id": "X", "validate_only": True}, "InvalidArgument", "INVALID_SPEC")
        fields = {violation["field"] for violation in details["BadRequest"]["field_violations"]}
        self.assertEqual(fields, {"training_run_id", "spec.pipeline.schedule", "spec.pipeline.microbatches"}, message)
        self.assertEqual(details["ErrorInfo"]["metadata"], {"violations": "3"})

    def test_03_create_refuses_a_second_run_and_a_taken_id(self):
        spec = self.call("GetTrainingRun", {"name": RUN})["spec"]
        # One run at a time: even the dry run says so.
        _, details = self.fails("CreateTrainingRun", {"spec": spec, "training_run_id": "another", "validate_only": True},
                                "FailedPrecondition", "ANOTHER_RUN_ACTIVE")
        self.assertEqual(details["ErrorInfo"]["metadata"]["active_run"], "tiny-run")
        self.assertEqual(details["PreconditionFailure"]["violations"][0]["subject"], RUN)
        self.fails("CreateTrainingRun", {"spec": spec, "training_run_id": "tiny-run"}, "AlreadyExists", "RUN_ALREADY_EXISTS")

    def test_04_get_and_list(self):
        run = self.call("GetTrainingRun", {"name": RUN})
        self.assertEqual((run["name"], run["state"], run["folder"]), (RUN, "STATE_RUNNING", self.training.folder))
        self.assertIn("decoder stage 1", run["plan_summary"])
        self.assertEqual([r["name"] for r in self.call("ListTrainingRuns", {"page_size": 1})["training_runs"]], [RUN])
        _, details = self.fails("GetTrainingRun", {"name": "trainingRuns/nothing"}, "NotFound", "RUN_NOT_FOUND")
        self.assertEqual(details["ResourceInfo"]["resource_name"], "trainingRuns/nothing")
        self.fails("ListTrainingRuns", {"page_token": "x"}, "InvalidArgument", "INVALID_PAGE_TOKEN")
        self.fails("ListTrainingRuns", {"page_size": -1}, "InvalidArgument", "INVALID_PAGE_SIZE")

    def test_05_watch_begins_after_a_step(self):
        lines = self.training.await_step(3)
        events = self.grpc.stream(CLUSTER + "WatchTrainingRun", {"name": RUN, "after_step": 2}, seconds=2)
        self.methods.add("WatchTrainingRun")
        steps = [event["step"] for event in events if "step" in event]
        self.assertEqual([int(step["step"]) for step in steps], list(range(3, 3 + len(steps))))
        self.assertEqual(steps[0]["loss"], lines[2]["loss"])
        self.assertEqual(int(steps[0]["tokens"]), lines[2]["tokens"])
        self.fails("WatchTrainingRun", {"name": "trainingRuns/nothing"}, "NotFound", "RUN_NOT_FOUND")

    def test_06_save_while_running(self):
        first = self.call("SaveCheckpoint", {"parent": RUN, "request_id": "6cf0d2b3-8a29-4a11-8a4e-3e8e7d0b8d01"})
        again = self.call("SaveCheckpoint", {"parent": RUN, "request_id": "6cf0d2b3-8a29-4a11-8a4e-3e8e7d0b8d01"})
        self.assertEqual(again["name"], first["name"])
        self.assertRegex(first["name"], RUN + r"/checkpoints/step-\d{8}$")

        def ready():
            checkpoint = self.call("GetCheckpoint", {"name": first["name"]})
            self.assertIn(checkpoint["state"], ("STATE_SAVING", "STATE_READY"))
            return checkpoint if checkpoint["state"] == "STATE_READY" else None
        checkpoint = wait_for("the checkpoint is ready", ready)
        self.assertTrue(os.path.exists(os.path.join(checkpoint["path"], "moonpipe.manifest.json")))
        size = sum(entry.stat().st_size for entry in os.scandir(checkpoint["path"]))
        self.assertEqual(int(checkpoint["size_bytes"]), size)
        self.fails("SaveCheckpoint", {"parent": "trainingRuns/nothing"}, "NotFound", "RUN_NOT_FOUND")
        self.fails("GetCheckpoint", {"name": RUN + "/checkpoints/step-99999999"}, "NotFound", "CHECKPOINT_NOT_FOUND")

    def test_07_pause_and_resume(self):
        self.fails("ResumeTrainingRun", {"name": RUN}, "FailedPrecondition", "WRONG_STATE")
        etag = self.call("GetTrainingRun", {"name": RUN})["etag"]
        self.call("PauseTrainingRun", {"name": RUN})
        self.fails("PauseTrainingRun", {"name": RUN, "etag": etag}, "Aborted", "STALE_ETAG")
        paused = self.await_state("STATE_PAUSED")
        _, details = self.fails("PauseTrainingRun", {"name": RUN}, "FailedPrecondition", "WRONG_STATE")
        self.assertEqual(details["ErrorInfo"]["metadata"]["state"], "PAUSED")
        # A paused run saves at once, after the step that it stands at.
        checkpoint = self.call("SaveCheckpoint", {"parent": RUN})
        self.assertEqual(checkpoint["step"], paused["step"])
        wait_for("the checkpoint is ready", lambda: self.call("GetCheckpoint", {"name": checkpoint["name"]})["state"] == "STATE_READY")
        self.assertEqual(self.call("GetTrainingRun", {"name": RUN})["step"], paused["step"])
        self.call("ResumeTrainingRun", {"name": RUN, "etag": self.call("GetTrainingRun", {"name": RUN})["etag"]})
        self.await_state("STATE_RUNNING")
        self.training.await_step(int(paused["step"]) + 1)

    def test_08_list_checkpoints_in_pages_and_forget_removed_ones(self):
        first = self.call("ListCheckpoints", {"parent": RUN, "page_size": 1})
        second = self.call("ListCheckpoints", {"parent": RUN, "page_size": 1, "page_token": first["next_page_token"]})
        steps = [int(page["checkpoints"][0]["step"]) for page in (first, second)]
        self.assertEqual(steps, sorted(steps, reverse=True))
        for _ in range(3):
            name = self.call("SaveCheckpoint", {"parent": RUN})["name"]
            wait_for(name, lambda name=name: self.call("GetCheckpoint", {"name": name})["state"] == "STATE_READY")
        kept = self.call("ListCheckpoints", {"parent": RUN})["checkpoints"]
        self.assertEqual({os.path.basename(c["path"]) for c in kept}, set(os.listdir(os.path.join(self.training.folder, "checkpoints"))))
        self.assertEqual(len(kept), 3)
        self.fails("ListCheckpoints", {"parent": "trainingRuns/nothing"}, "NotFound", "RUN_NOT_FOUND")

    def test_09_stop_ends_with_a_checkpoint(self):
        self.call("StopTrainingRun", {"name": RUN})
        # The whole cluster ends after the run, so its own words say how.
        self.assertEqual(self.training.process.end(), 0)
        self.assertIn("stopped at step", self.training.process.output())
        last = self.training.lines()[-1]["step"]
        self.assertIn(f"step-{last:08d}", os.listdir(os.path.join(self.training.folder, "checkpoints")))

    def test_10_every_method_was_driven(self):
        with open(os.path.join(os.path.dirname(__file__), "..", "..", "protos", "moonpipe", "cluster", "v1", "cluster_service.proto"),
                  encoding="utf-8") as file:
            methods = {line.split()[1].split("(")[0] for line in file if line.startswith("  rpc ")}
        self.assertEqual(self.methods, methods)


if __name__ == "__main__":
    tool("grpcurl")
    unittest.main()
