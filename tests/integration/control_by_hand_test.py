#!/usr/bin/env python3
"""Services started by hand and the commands that talk to them: a whole run by submit, status, watch, pause, resume, save and stop."""
import json
import os
import re
import signal
import subprocess
import unittest

from cluster import PROGRAMS, Case, Grpcurl, Process, TOOLS, metrics_lines, read, services_by_hand, wait_for, write_run_file


class ByHand(Case):
    def command(self, address, *arguments, fails=False):
        result = subprocess.run([os.path.join(PROGRAMS, "moonpipe"), arguments[0], "--coordinator", address, *arguments[1:]],
                                capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(result.returncode, 1 if fails else 0, result.stdout + result.stderr)
        return result.stderr if fails else result.stdout

    def await_state(self, address, state):
        wait_for(state, lambda: state in self.command(address, "status", "by-hand"))

    def await_step(self, folder, step):
        def look():
            self.assertNotIn("run by-hand failed", read(os.path.join(folder, "coordinator.log")))
            return any(line["step"] >= step for line in metrics_lines(os.path.join(folder, "runs", "by-hand")))
        wait_for(f"step {step}", look)

    def all_left(self, processes, but=()):
        return {name: process.end() for name, process in processes.items() if name not in but}

    def test_a_whole_run_by_the_commands(self):
        with services_by_hand() as (folder, address, processes):
            run_file = write_run_file(os.path.join(folder, "model"), steps=100000)
            self.assertEqual(self.command(address, "status"), "no runs\n")
            self.assertEqual(self.command(address, "submit", run_file, "--id", "by-hand", "--validate-only"), "the run file is good\n")
            self.assertEqual(self.command(address, "status"), "no runs\n")
            self.assertIn("did you mean steps?", self.command(address, "submit", run_file, "--id", "by-hand", "--set", "train.stepz=1", fails=True))
            self.assertRegex(self.command(address, "submit", run_file, "--id", "by-hand"), "^trainingRuns/by-hand  PENDING  step 0 of 100000")
            watch = Process([os.path.join(PROGRAMS, "moonpipe"), "watch", "--coordinator", address, "by-hand", "--json"],
                            os.path.join(folder, "watch.log"))
            try:
                self.await_step(folder, 2)
                self.command(address, "pause", "by-hand")
                self.await_state(address, "PAUSED")
                self.assertIn("cannot be paused", self.command(address, "pause", "by-hand", fails=True))
                saved = self.command(address, "save", "by-hand")
                path = re.match(r"trainingRuns/by-hand/checkpoints/step-\d{8}  (\S+)  \d+ bytes\n$", saved).group(1)
                self.assertTrue(os.path.exists(os.path.join(path, "moonpipe.manifest.json")))
                self.command(address, "resume", "by-hand")
                self.await_state(address, "RUNNING")
                self.await_step(folder, metrics_lines(os.path.join(folder, "runs", "by-hand"))[-1]["step"] + 1)
                # A save is announced and waited for while the run goes on.
                self.assertIn("bytes", self.command(address, "save", "by-hand"))
                self.command(address, "stop", "by-hand")
                self.await_state(address, "STOPPED")
                self.assertEqual(watch.end(), 0, watch.output())
            finally:
                watch.stop()
            steps = [json.loads(line)["step"] for line in watch.output().splitlines()]
            lines = metrics_lines(os.path.join(folder, "runs", "by-hand"))
            self.assertEqual(steps, [line["step"] for line in lines])
            # `watch` also begins where it is told to, also after the end.
            rest = self.command(address, "watch", "by-hand", "--after-step", str(steps[-2]))
            self.assertEqual(re.findall(r"step: +(\d+)/", rest), [str(steps[-1])])
            self.assertIn("trainingRuns/by-hand is STOPPED", rest)
            # The drained workers have left with success; the coordinator serves on.
            self.assertEqual(set(self.all_left(processes, but=("coordinator",)).values()), {0})
            self.assertIn("STOPPED", self.command(address, "status", "by-hand"))
            self.assertIn("no run", self.command(address, "status", "nothing", fails=True))
            processes["coordinator"].popen.send_signal(signal.SIGTERM)
            self.assertEqual(processes["coordinator"].end(), 0)

    def test_sigterm_to_the_coordinator_stops_the_run_with_a_checkpoint(self):
        with services_by_hand(stages=1) as (folder, address, processes):
            run_file = write_run_file(os.path.join(folder, "model"), steps=100000, stages=1)
            self.command(address, "submit", run_file, "--id", "by-hand")
            self.await_step(folder, 2)
            processes["coordinator"].popen.send_signal(signal.SIGTERM)
            self.assertEqual(self.all_left(processes), {name: 0 for name in processes},
                             "\n".join(f"{name}:\n{process.output()}" for name, process in processes.items()))
            run = os.path.join(folder, "runs", "by-hand")
            self.assertEqual(os.listdir(os.path.join(run, "checkpoints")), [f"step-{metrics_lines(run)[-1]['step']:08d}"])

    def test_sigterm_before_any_run_drains_the_workers(self):
        with services_by_hand(stages=1) as (_, address, processes):
            wait_for("all have registered", lambda: processes["coordinator"].output().count(" registered") == 3)
            processes["coordinator"].popen.send_signal(signal.SIGTERM)
            self.assertEqual(self.all_left(processes), {name: 0 for name in processes})

    @unittest.skipUnless(os.path.exists(os.path.join(TOOLS, "grpcurl")), "grpcurl is absent")
    def test_a_repeated_create_is_harmless_and_a_run_that_goes_on_lists_its_old_checkpoints(self):
        service = "moonpipe.cluster.v1.ClusterService/"
        with services_by_hand(stages=1) as (folder, address, processes):
            run_file = write_run_file(os.path.join(folder, "model"), steps=3, stages=1, more={"checkpoint": {"every_steps": 2}})
            self.command(address, "submit", run_file, "--id", "by-hand")
            self.await_state(address, "SUCCEEDED")
            spec = Grpcurl(address).call(service + "GetTrainingRun", {"name": "trainingRuns/by-hand"})["spec"]
            processes["coordinator"].popen.send_signal(signal.SIGTERM)
            self.all_left(processes)
            # The next coordinator finds the run's folder.
            with services_by_hand(stages=1, folder=folder) as (_, address, processes):
                spec["train"]["steps"] = "100000"
                # No newer checkpoint, which would let go of the old ones.
                spec["checkpoint"]["everySteps"] = "1000000"
                request = {"spec": spec, "training_run_id": "by-hand", "request_id": "8c0b2b5e-2a50-4a8c-9b38-b5a0c7a0e9f1"}
                grpc = Grpcurl(address)
                self.assertNotIn("uid", grpc.call(service + "CreateTrainingRun", {**request, "validate_only": True}))
                first = grpc.call(service + "CreateTrainingRun", request)
                self.assertEqual(grpc.call(service + "CreateTrainingRun", request)["uid"], first["uid"])
                changed = {**request, "spec": {**spec, "train": {**spec["train"], "seed": "5"}}}
                self.assertEqual(grpc.error(service + "CreateTrainingRun", changed)[2]["ErrorInfo"]["reason"], "REQUEST_ID_REUSED")
                self.await_step(folder, 4)
                found = grpc.call(service + "ListCheckpoints", {"parent": "trainingRuns/by-hand"})["checkpoints"]
                old = {int(checkpoint["step"]): checkpoint for checkpoint in found}[3]
                self.assertEqual(old["state"], "STATE_READY")
                self.assertTrue(os.path.isdir(old["path"]))


if __name__ == "__main__":
    unittest.main()
