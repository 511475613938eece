"""A small cluster for tests in Python: a tiny model on the pictures of examples/digits, `moonpipe train`, or services by hand."""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DIGITS = os.path.join(ROOT, "examples", "digits")
PROGRAMS = os.environ.get("MOONPIPE_PROGRAMS", os.path.join(ROOT, "build", "dev", "bin"))
TOOLS = os.path.join(os.environ.get("MOONPIPE_TOOLS", ""), "bin")
# Far above what anything here takes; a test that runs into it has failed.
PATIENCE = 90


def tool(name):
    """The path of a test tool; ends the test as skipped where it is absent."""
    path = os.path.join(TOOLS, name)
    if not os.path.exists(path):
        print(f"skipped: {name} is not in {TOOLS}; scripts/setup installs it")
        sys.exit(77)
    return path


def wait_for(what, condition, patience=PATIENCE):
    """The first true value of `condition`, which is asked every 20 ms."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {patience} s")


def write_run_file(folder, steps=8, stages=2, microbatches=4, evaluate=False, more=None):
    """A run file of a tiny Kimi-VL in `folder`; returns its path."""
    with open(os.path.join(DIGITS, "model", "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["text_config"].update(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                                 num_key_value_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    config["vision_config"].update(num_attention_heads=2, num_hidden_layers=2, hidden_size=32, intermediate_size=48)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    run = {
        "model": {"config": os.path.join(folder, "config.json")},
        "data": {"train": os.path.join(DIGITS, "train-000000.tar"), "tokenizer": os.path.join(DIGITS, "tokenizer")},
        "pipeline": {"stages": stages, "microbatches": microbatches, "microbatch_tokens": 256},
        "train": {"steps": steps, "seed": 1},
        "optimizer": {"learning_rate": 4e-3, "schedule": {"kind": "cosine", "warmup_steps": 2}},
    }
    if evaluate:
        run["eval"] = {"sets": [{"name": "heldout-one", "files": os.path.join(DIGITS, "heldout-one.tar")}]}
    for key, value in (more or {}).items():
        run.setdefault(key, {}).update(value)
    path = os.path.join(folder, "tiny.yaml")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(run, file, indent=1)  # JSON is YAML.
    return path


class Process:
    """A child whose output goes to a file."""

    def __init__(self, arguments, log):
        self.log = log
        with open(log, "ab") as file:
            self.popen = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def output(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def running(self):
        return self.popen.poll() is None

    def end(self, patience=PATIENCE):
        """Waits for the exit code."""
        try:
            return self.popen.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.popen.args[0]} still runs after {patience} s:\n{self.output()}") from None

    def stop(self):
        if self.running():
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
            try:
                self.popen.wait(10)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def fetch(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as response:
        return response.read().decode()


def metrics_lines(run_folder):
    """The whole lines of metrics.jsonl."""
    text = read(os.path.join(run_folder, "metrics.jsonl"))
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


class Training:
    """`moonpipe train` on a tiny model in a folder of its own."""

    def __init__(self, arguments=(), **run):
        self.temp = tempfile.TemporaryDirectory(prefix="moonpipe-test-")
        self.folder = os.path.join(self.temp.name, "runs", "tiny-run")
        self.run_file = write_run_file(os.path.join(self.temp.name, "model"), **run)
        self.process = Process([os.path.join(PROGRAMS, "moonpipe"), "train", self.run_file, "--run-folder", self.folder, *arguments],
                               os.path.join(self.temp.name, "train.log"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stop()
        self.temp.cleanup()

    def _alive(self):
        if not self.process.running():
            raise AssertionError("the run has ended:\n" + self.process.output())

    def coordinator(self):
        def look():
            self._alive()
            return read(os.path.join(self.folder, "addresses", "coordinator"))
        return wait_for("the coordinator's address", look)

    def services(self):
        def look():
            text = read(os.path.join(self.folder, "services.json"))
            self._alive()
            return json.loads(text) if text else None
        return wait_for("services.json", look)

    def lines(self):
        return metrics_lines(self.folder)

    def await_step(self, step):
        def look():
            lines = self.lines()
            if lines and lines[-1]["step"] >= step:
                return lines
            self._alive()
            return None
        return wait_for(f"step {step}", look)


@contextlib.contextmanager
def services_by_hand(stages=2, folder=None):
    """Coordinator, dataloader, encoder and stages as a person starts them: yields (folder, coordinator's address, processes by name).
    With `folder`, that of an earlier call, its runs are there already."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpipe-test-"))
        processes = {}

        def start(name, program, *arguments):
            address_file = os.path.join(folder, name + ".address")
            with contextlib.suppress(FileNotFoundError):
                os.remove(address_file)
            processes[name] = Process([os.path.join(PROGRAMS, program), "--address-file", address_file, *arguments],
                                      os.path.join(folder, name + ".log"))
            stack.callback(processes[name].stop)

        start("coordinator", "moonpipe-coordinator", "--runs-folder", os.path.join(folder, "runs"))
        address = wait_for("the coordinator's address", lambda: read(os.path.join(folder, "coordinator.address")))
        start("dataloader", "moonpipe-dataloader", "--coordinator", address)
        start("vision-encoder", "moonpipe-vision-encoder", "--coordinator", address)
        for stage in range(stages):
            start(f"decoder-stage-{stage}", "moonpipe-decoder-stage", "--coordinator", address, "--ordinal", str(stage))
        yield folder, address, processes


class Grpcurl:
    """Calls through reflection."""

    def __init__(self, address):
        self.program = tool("grpcurl")
        self.address = address

    def _run(self, *arguments, timeout=30):
        return subprocess.run([self.program, "-plaintext", *arguments], capture_output=True, text=True, timeout=timeout, check=False)

    def services(self):
        result = self._run(self.address, "list")
        if result.returncode:
            raise AssertionError(result.stderr)
        return result.stdout.split()

    def stream(self, method, request=None, seconds=0):
        """Messages of the answer; with `seconds` a call that is still open then is ended."""
        limit = ["-max-time", str(seconds)] if seconds else []
        result = self._run(*limit, "-d", json.dumps(request or {}), self.address, method)
        if result.returncode and not (seconds and "DeadlineExceeded" in result.stderr):
            raise AssertionError(result.stderr)
        decoder, text, messages = json.JSONDecoder(), result.stdout, []
        while text.strip():
            message, end = decoder.raw_decode(text.lstrip())
            messages.append(message)
            text = text.lstrip()[end:]
        return messages

    def call(self, method, request=None):
        return self.stream(method, request)[0]

    def error(self, method, request=None):
        """(code, message, details by type) of a call that must fail."""
        result = self._run("-d", json.dumps(request or {}), self.address, method)
        if not result.returncode:
            raise AssertionError(f"{method} did not fail: {result.stdout}")
        code = re.search(r"Code: (\w+)", result.stderr)
        message = re.search(r"Message: (.*)", result.stderr)
        details = {}
        for block in re.split(r"\n\s*\d+\)\s*", result.stderr)[1:]:
            start = block.index("{")
            detail, _ = json.JSONDecoder().raw_decode(block[start:])
            details[detail["@type"].rsplit(".", 1)[-1]] = detail
        return (code.group(1) if code else result.stderr, message.group(1) if message else "", details)


class Case(unittest.TestCase):
    maxDiff = None
