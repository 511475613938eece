#!/usr/bin/env python3
"""Tests of deploy/kustomize: renders every overlay with kubectl and asserts what must be there.

usage: test_kustomize.py [--programs FOLDER] [unittest arguments]
Exit code 77 where kubectl or PyYAML is absent. kubernetes-validate is looked for on PATH and in $MOONPIPE_TOOLS/bin; without it only
the validation against the schemas is skipped.
"""
import copy
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import promql

try:
    import yaml
except ImportError:
    yaml = None

KUBECTL = shutil.which("kubectl")
TOOLS = os.environ.get("MOONPIPE_TOOLS")
VALIDATE = shutil.which("kubernetes-validate", path=os.environ.get("PATH", "") + (f":{TOOLS}/bin" if TOOLS else ""))
PROGRAMS = None
ROOT = promql.ROOT
KUSTOMIZE = os.path.join(ROOT, "deploy", "kustomize")
SERVICES = ("coordinator", "dataloader", "vision-encoder", "decoder-stage")
PORTS = {"grpc": 50051, "health": 50052, "metrics": 9464}
LISTEN = {"--listen": "grpc", "--health-listen": "health", "--metrics-listen": "metrics"}
FOLDERS = ("base", "overlays/cpu", "overlays/gpu", "overlays/jobset")
COMPONENT = "app.kubernetes.io/component"


@functools.lru_cache(maxsize=None)
def render(folder):
    """The rendered text of a folder below deploy/kustomize."""
    result = subprocess.run([KUBECTL, "kustomize", os.path.join(KUSTOMIZE, folder)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AssertionError(f"kubectl kustomize {folder}: {result.stderr}")
    return result.stdout


@functools.lru_cache(maxsize=None)
def render_with_monitoring(folder):
    with tempfile.TemporaryDirectory() as work:
        def relative(path):
            return os.path.relpath(os.path.join(KUSTOMIZE, path), os.path.realpath(work))
        with open(os.path.join(work, "kustomization.yaml"), "w", encoding="utf-8") as file:
            json.dump({"resources": [relative(folder)], "components": [relative("components/monitoring")]}, file)
        result = subprocess.run([KUBECTL, "kustomize", work], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AssertionError(f"kubectl kustomize of {folder} with monitoring: {result.stderr}")
    return result.stdout


@functools.lru_cache(maxsize=None)
def documents(text):
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, Loader=loader) if document]


def of_kind(folder, kind):
    return [document for document in documents(render(folder)) if document["kind"] == kind]


def pods(folder):
    """Name -> pod template of all pods of a folder."""
    found = {document["metadata"]["name"]: document["spec"]["template"] for document in of_kind(folder, "StatefulSet")}
    for job_set in of_kind(folder, "JobSet"):
        for job in job_set["spec"]["replicatedJobs"]:
            found[job["name"]] = job["template"]["spec"]["template"]
    return found


def fill_data():
    with open(os.path.join(KUSTOMIZE, "tools", "fill-data.yaml"), encoding="utf-8") as file:
        return file.read()


def services_pods(folder):
    return {name: pod for name, pod in pods(folder).items() if name in SERVICES}


def flags(container):
    """Flag -> value of a container's arguments."""
    return dict(argument.partition("=")[::2] for argument in container["args"] if argument.startswith("--"))


def known_flags():
    known = {}
    for *program, flag in promql.read_lines(os.path.join(ROOT, "deploy", "flags.txt")):
        known.setdefault(" ".join(program), set()).add(flag)
    return known


def selects(selector, labels):
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


class Network:
    """What the policies of a folder let through between pods of its namespace."""

    def __init__(self, policies):
        self.policies = policies

    def passes(self, direction, mine, other, port):
        peer_key, rules_key = ("from", "ingress") if direction == "Ingress" else ("to", "egress")
        for policy in self.policies:
            spec = policy["spec"]
            if direction not in spec["policyTypes"] or not selects(spec["podSelector"], mine):
                continue
            for rule in spec.get(rules_key, []):
                near = any("namespaceSelector" not in peer and selects(peer["podSelector"], other) for peer in rule[peer_key])
                if near and any(p["protocol"] == "TCP" and p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"]):
                    return True
        return False

    def allows(self, source, target, port):
        return self.passes("Egress", source, target, port) and self.passes("Ingress", target, source, port)


def proto_fields():
    """Message -> field -> type, of training_run_spec.proto: the schema of run files."""
    path = os.path.join(ROOT, "protos", "moonpipe", "cluster", "v1", "training_run_spec.proto")
    with open(path, encoding="utf-8") as file:
        text = re.sub(r"//.*", "", file.read())
    text = re.sub(r"enum \w+ \{[^}]*\}", "", text)
    return {message: {field: kind for kind, field in re.findall(r"(?:optional|repeated)?\s*\b([\w.]+)\s+(\w+)\s*=\s*\d+;", body)}
            for message, body in re.findall(r"message (\w+) \{([^}]*)\}", text)}


def unknown_fields(value, message, fields, path=""):
    for key, child in value.items():
        if key not in fields[message]:
            yield path + key
            continue
        kind = fields[message][key]
        if kind in fields:
            for item in child if isinstance(child, list) else [child]:
                yield from unknown_fields(item, kind, fields, f"{path}{key}.")


class Rendering(unittest.TestCase):
    def test_every_overlay_passes_the_schemas_of_kubernetes(self):
        if not VALIDATE:
            self.skipTest("kubernetes-validate is neither on PATH nor in $MOONPIPE_TOOLS/bin")
        self.validate([render(folder) for folder in FOLDERS] + [render_with_monitoring("base"), fill_data()])
        self.validate([render("base").replace("podManagementPolicy:", "podManagementPolitics:")], expect=False)

    def validate(self, texts, expect=True):
        with tempfile.TemporaryDirectory() as work:
            paths = [os.path.join(work, f"rendered-{index}.yaml") for index in range(len(texts))]
            for path, text in zip(paths, texts):
                with open(path, "w", encoding="utf-8") as file:
                    file.write(text)
            result = subprocess.run([VALIDATE, "--strict", "-k", "1.32", *paths], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode == 0, expect, result.stdout + result.stderr)

    def test_the_jobs_of_the_job_set_pass_the_schemas_too(self):
        if not VALIDATE:
            self.skipTest("kubernetes-validate is neither on PATH nor in $MOONPIPE_TOOLS/bin")
        jobs = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, "spec": job["template"]["spec"]}
                for job in of_kind("overlays/jobset", "JobSet")[0]["spec"]["replicatedJobs"]]
        self.validate([yaml.safe_dump_all(jobs)])
        broken = copy.deepcopy(jobs[-1])
        broken["spec"]["completion"] = 1
        self.validate([yaml.safe_dump(broken)], expect=False)

    def test_no_object_names_a_namespace(self):
        for folder in FOLDERS:
            for document in documents(render_with_monitoring(folder)):
                self.assertNotIn("namespace", document["metadata"])

    def test_objects_and_pods_bear_the_common_labels(self):
        with open(os.path.join(ROOT, "CMakeLists.txt"), encoding="utf-8") as file:
            version = re.search(r"project\(moonpipe VERSION ([\d.]+)", file.read()).group(1)
        common = {"app.kubernetes.io/name": "moonpipe", "app.kubernetes.io/instance": "moonpipe", "app.kubernetes.io/version": version,
                  "app.kubernetes.io/part-of": "moonpipe", "app.kubernetes.io/managed-by": "kustomize"}
        for folder in FOLDERS:
            for document in documents(render(folder)):
                self.assertLessEqual(common.items(), document["metadata"]["labels"].items(), document["metadata"]["name"])
            for name, pod in services_pods(folder).items():
                self.assertLessEqual({**common, COMPONENT: name}.items(), pod["metadata"]["labels"].items())

    def test_images_have_a_tag(self):
        for folder in FOLDERS:
            for pod in pods(folder).values():
                for container in pod["spec"]["containers"]:
                    self.assertRegex(container["image"], r"^moonpipe:\d+\.\d+\.\d+(-cuda)?$")


class Pods(unittest.TestCase):
    def test_every_folder_has_the_four_services(self):
        for folder in FOLDERS:
            self.assertEqual(set(services_pods(folder)), set(SERVICES))
        self.assertEqual(set(pods("overlays/jobset")), {*SERVICES, "submit"})
        self.assertEqual(of_kind("overlays/jobset", "StatefulSet"), [])

    def test_every_container_is_restricted(self):
        for folder in (*FOLDERS, "tools"):
            for name, pod in ({"fill-data": documents(fill_data())[0]} if folder == "tools" else pods(folder)).items():
                with self.subTest(folder=folder, pod=name):
                    spec = pod["spec"]
                    self.assertIs(spec["automountServiceAccountToken"], False)
                    self.assertIs(spec["securityContext"]["runAsNonRoot"], True)
                    self.assertGreater(spec["securityContext"]["runAsUser"], 0)
                    self.assertEqual(spec["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
                    for key in ("hostNetwork", "hostPID", "hostIPC"):
                        self.assertNotIn(key, spec)
                    for container in spec["containers"] + spec.get("initContainers", []):
                        self.assertEqual(container["securityContext"], {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                                                                        "capabilities": {"drop": ["ALL"]}})
                        self.assertIn("memory", container["resources"]["limits"])
                        self.assertLessEqual({"cpu", "memory"}, set(container["resources"]["requests"]))
                    for volume in spec["volumes"]:
                        self.assertEqual(len({"emptyDir", "persistentVolumeClaim", "configMap"} & set(volume)), 1, volume)
                        self.assertTrue("emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], volume)

    def test_probes_ask_the_plain_health_port(self):
        for folder in FOLDERS:
            for name, pod in services_pods(folder).items():
                container = pod["spec"]["containers"][0]
                asked = {kind: container[kind]["grpc"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
                self.assertEqual(asked, {"startupProbe": {"port": 50052, "service": "readiness"},
                                         "readinessProbe": {"port": 50052, "service": "readiness"},
                                         "livenessProbe": {"port": 50052, "service": "liveness"}}, name)
                self.assertGreaterEqual(container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"], 600)

    def test_ports_agree_between_flags_containers_and_services(self):
        for folder in FOLDERS:
            services = {document["metadata"]["name"]: document["spec"] for document in of_kind(folder, "Service")}
            self.assertEqual(set(services), set(SERVICES))
            for name, pod in services_pods(folder).items():
                container = pod["spec"]["containers"][0]
                self.assertEqual({port["name"]: port["containerPort"] for port in container["ports"]}, PORTS)
                given = flags(container)
                self.assertEqual({port: given[flag] for flag, port in LISTEN.items()},
                                 {port: f"0.0.0.0:{number}" for port, number in PORTS.items()})
                self.assertIn("--insecure", given, "plain text beyond loopback must be said aloud")
                self.assertEqual({port["targetPort"]: port["port"] for port in services[name]["ports"]}, PORTS)
                self.assertEqual({port["name"] for port in services[name]["ports"]}, set(PORTS))
                if name != "coordinator":
                    host, _, port = given["--coordinator"].partition(":")
                    self.assertIn(host, services)
                    self.assertEqual(int(port), PORTS["grpc"])

    def test_services_are_headless_and_publish_addresses_before_they_are_ready(self):
        for folder in FOLDERS:
            for service in of_kind(folder, "Service"):
                self.assertEqual(service["spec"]["clusterIP"], "None")
                self.assertIs(service["spec"]["publishNotReadyAddresses"], True)
                selected = [name for name, pod in pods(folder).items() if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
                self.assertEqual(selected, [service["metadata"]["name"]])

    def test_stateful_sets_start_all_pods_at_once_under_their_service(self):
        for folder in FOLDERS[:3]:
            sets = of_kind(folder, "StatefulSet")
            self.assertEqual({document["spec"]["serviceName"] for document in sets}, set(SERVICES))
            for document in sets:
                self.assertEqual(document["spec"]["podManagementPolicy"], "Parallel")
                self.assertEqual(document["metadata"]["name"], document["spec"]["serviceName"])
                self.assertTrue(selects(document["spec"]["selector"], document["spec"]["template"]["metadata"]["labels"]))
                if document["metadata"]["name"] != "decoder-stage":
                    self.assertEqual(document["spec"]["replicas"], 1)

    def test_the_ordinal_is_the_index_of_the_pod(self):
        labels = {"overlays/jobset": "batch.kubernetes.io/job-completion-index"}
        for folder in FOLDERS:
            label = labels.get(folder, "apps.kubernetes.io/pod-index")
            for name, pod in services_pods(folder).items():
                container = pod["spec"]["containers"][0]
                environment = {item["name"]: item["valueFrom"]["fieldRef"]["fieldPath"] for item in container["env"]}
                expected = {"POD_IP": "status.podIP"}
                if name != "coordinator":
                    expected["ORDINAL"] = f"metadata.labels['{label}']"
                    self.assertEqual(flags(container)["--ordinal"], "$(ORDINAL)")
                self.assertEqual(environment, expected)
                self.assertEqual(flags(container)["--advertise-host"], "$(POD_IP)")

    def test_every_flag_is_known(self):
        known = known_flags()
        for folder in FOLDERS:
            for pod in pods(folder).values():
                for container in pod["spec"]["containers"]:
                    program = container["command"][0]
                    if program == "moonpipe":
                        program += " " + container["args"][0]
                    self.assertEqual(set(flags(container)) - known[program], set(), program)

    def test_the_list_of_flags_is_that_of_the_programs(self):
        known = known_flags()
        present = {p: os.path.join(PROGRAMS or "", p.split()[0]) for p in known if PROGRAMS and os.path.exists(os.path.join(PROGRAMS, p.split()[0]))}
        if not present:
            self.skipTest("no program is built: give their folder by --programs")
        for program, path in present.items():
            result = subprocess.run([path, *program.split()[1:], "--help"], capture_output=True, text=True, check=False, timeout=60)
            for flag in known[program]:
                self.assertRegex(result.stdout + result.stderr, re.escape(flag) + r"\b", program)

    def test_workers_write_checkpoints_where_the_coordinator_does(self):
        for folder in FOLDERS:
            for name, pod in services_pods(folder).items():
                mounts = {mount["mountPath"]: mount for mount in pod["spec"]["containers"][0]["volumeMounts"]}
                claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]
                          if "persistentVolumeClaim" in volume}
                self.assertTrue(mounts["/data"]["readOnly"])
                self.assertIn("/tmp", mounts, "the root file system is read-only")
                self.assertEqual("/runs" in mounts, name != "dataloader")
                if name != "dataloader":
                    self.assertEqual(claims[mounts["/runs"]["name"]], "runs")
                if name == "coordinator":
                    self.assertEqual(flags(pod["spec"]["containers"][0])["--runs-folder"], "/runs")
            self.assertEqual({claim["metadata"]["name"] for claim in of_kind(folder, "PersistentVolumeClaim")}, {"data", "runs"})

    def test_a_drain_of_a_node_takes_no_pod(self):
        for folder in FOLDERS:
            budget, = of_kind(folder, "PodDisruptionBudget")
            for name, pod in pods(folder).items():
                self.assertEqual(selects(budget["spec"]["selector"], pod["metadata"]["labels"]), name in SERVICES)
            if folder == "overlays/jobset":
                jobs = of_kind(folder, "JobSet")[0]["spec"]["replicatedJobs"]
                count = sum(job["template"]["spec"]["completions"] for job in jobs if job["name"] in SERVICES)
                self.assertEqual(budget["spec"].get("minAvailable"), count)
                self.assertNotIn("maxUnavailable", budget["spec"])
            else:
                self.assertEqual(budget["spec"]["maxUnavailable"], 0)

    def test_termination_leaves_time_for_a_checkpoint(self):
        for folder in FOLDERS:
            for name, pod in services_pods(folder).items():
                self.assertGreaterEqual(pod["spec"]["terminationGracePeriodSeconds"], 60, name)


class Policies(unittest.TestCase):
    def test_everything_is_denied_by_default(self):
        for folder in FOLDERS:
            deny = [policy["spec"] for policy in of_kind(folder, "NetworkPolicy") if policy["metadata"]["name"] == "default-deny"]
            self.assertEqual(deny, [{"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}])

    def test_only_the_named_flows_pass(self):
        workers = {"dataloader", "vision-encoder", "decoder-stage"}
        computing = {"vision-encoder", "decoder-stage"}
        for folder in FOLDERS:
            network = Network(of_kind(folder, "NetworkPolicy"))
            labels = {name: pod["metadata"]["labels"] for name, pod in services_pods(folder).items()}
            labels["client"] = {"moonpipe.dev/client": "true"}
            labels["stranger"] = {"app": "stranger"}
            passed = {(source, target, port) for source in labels for target in labels for port in (50051, 50052, 9464, 40000, 40999, 41000, 22)
                      if network.allows(labels[source], labels[target], port)}
            expected = {(source, "coordinator", 50051) for source in workers | {"client", "coordinator"}}
            expected |= {(source, "dataloader", 50051) for source in computing}
            expected |= {(source, target, port) for source in computing for target in computing for port in (40000, 40999)}
            self.assertEqual(passed, expected, folder)

    def test_the_submitting_pod_of_the_job_set_is_a_client(self):
        submit = pods("overlays/jobset")["submit"]
        network = Network(of_kind("overlays/jobset", "NetworkPolicy"))
        self.assertTrue(network.allows(submit["metadata"]["labels"], pods("overlays/jobset")["coordinator"]["metadata"]["labels"], 50051))

    def test_edges_listen_in_the_open_range(self):
        for folder in FOLDERS:
            edges, = [policy["spec"] for policy in of_kind(folder, "NetworkPolicy") if policy["metadata"]["name"] == "allow-edges"]
            port, = edges["ingress"][0]["ports"]
            for name, pod in services_pods(folder).items():
                if selects(edges["podSelector"], pod["metadata"]["labels"]):
                    self.assertEqual(pod["spec"]["securityContext"]["sysctls"],
                                     [{"name": "net.ipv4.ip_local_port_range", "value": f"{port['port']} {port['endPort']}"}], name)

    def test_prometheus_reaches_the_metrics_and_nothing_else(self):
        for folder in FOLDERS:
            foreign = [(policy["metadata"]["name"], rule["ports"]) for policy in of_kind(folder, "NetworkPolicy")
                       for rule in policy["spec"].get("ingress", []) if any("namespaceSelector" in peer for peer in rule["from"])]
            self.assertEqual(foreign, [("allow-prometheus", [{"protocol": "TCP", "port": 9464}])])


class RunFiles(unittest.TestCase):
    def run_file(self, folder):
        config, = [document for document in of_kind(folder, "ConfigMap") if document["metadata"]["name"] == "run"]
        self.assertEqual(list(config["data"]), ["run.yaml"])
        return yaml.safe_load(config["data"]["run.yaml"])

    def test_run_files_have_only_fields_of_the_spec(self):
        fields = proto_fields()
        self.assertIn("learning_rate", fields["OptimizerSpec"])
        self.assertEqual(list(unknown_fields({"optimizer": {"schedule": {"warm_up": 1}}}, "TrainingRunSpec", fields)), ["optimizer.schedule.warm_up"])
        for folder in FOLDERS:
            self.assertEqual(list(unknown_fields(self.run_file(folder), "TrainingRunSpec", fields)), [])

    def test_run_files_say_what_is_required(self):
        for folder in FOLDERS:
            run = self.run_file(folder)
            self.assertEqual(len({"path", "config", "flavor"} & set(run["model"])), 1)
            self.assertTrue(run["train"]["steps"] and run["pipeline"]["microbatch_tokens"] and run["optimizer"]["learning_rate"])

    def test_there_is_a_pod_for_every_stage(self):
        for folder in FOLDERS:
            stages = self.run_file(folder)["pipeline"]["stages"]
            if folder == "overlays/jobset":
                job, = [job for job in of_kind(folder, "JobSet")[0]["spec"]["replicatedJobs"] if job["name"] == "decoder-stage"]
                self.assertEqual((job["template"]["spec"]["completions"], job["template"]["spec"]["parallelism"]), (stages, stages))
            else:
                stage, = [document for document in of_kind(folder, "StatefulSet") if document["metadata"]["name"] == "decoder-stage"]
                self.assertEqual(stage["spec"]["replicas"], stages)

    def test_all_paths_are_on_the_data_volume(self):
        for folder in FOLDERS:
            for path in re.findall(r"(?<![\w.])/[\w.{}*/-]+", json.dumps(self.run_file(folder))):
                self.assertTrue(path.startswith("/data/"), path)

    def test_the_coordinator_has_the_run_file(self):
        for folder in FOLDERS:
            spec = pods(folder)["coordinator"]["spec"]
            volume, = [volume["name"] for volume in spec["volumes"] if volume.get("configMap", {}).get("name") == "run"]
            self.assertIn({"name": volume, "mountPath": "/etc/moonpipe", "readOnly": True}, spec["containers"][0]["volumeMounts"])


class Overlays(unittest.TestCase):
    def test_gpu_gives_each_computing_pod_one_gpu(self):
        for name, pod in services_pods("overlays/gpu").items():
            resources = pod["spec"]["containers"][0]["resources"]
            expected = "1" if name in ("vision-encoder", "decoder-stage") else None
            self.assertEqual(resources["limits"].get("nvidia.com/gpu"), expected)
            self.assertEqual(resources["requests"].get("nvidia.com/gpu"), expected)
            mounts = {mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
            self.assertEqual("/dev/shm" in mounts, expected is not None)

    def test_cpu_asks_for_no_more_than_a_laptop_has(self):
        cores = 0.0
        for document in of_kind("overlays/cpu", "StatefulSet"):
            cpu = document["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
            cores += document["spec"]["replicas"] * (float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu))
            self.assertNotIn("nvidia", json.dumps(document))
        self.assertLessEqual(cores, 2)

    def test_the_job_set_has_the_fields_of_v1alpha2_only(self):
        job_set, = of_kind("overlays/jobset", "JobSet")
        self.assertEqual(job_set["apiVersion"], "jobset.x-k8s.io/v1alpha2")
        spec = job_set["spec"]
        self.assertEqual(set(spec), {"replicatedJobs", "network", "successPolicy", "failurePolicy", "coordinator"})
        self.assertEqual(spec["network"], {"enableDNSHostnames": True, "publishNotReadyAddresses": True})
        self.assertEqual(set(spec["failurePolicy"]), {"maxRestarts"})
        names = [job["name"] for job in spec["replicatedJobs"]]
        self.assertLessEqual(set(spec["successPolicy"]["targetReplicatedJobs"]), set(names))
        self.assertEqual(set(spec["coordinator"]), {"replicatedJob", "jobIndex", "podIndex"})
        for job in spec["replicatedJobs"]:
            self.assertLessEqual(set(job), {"name", "replicas", "template", "dependsOn"})
            for dependency in job.get("dependsOn", []):
                self.assertIn(dependency["name"], names)
                self.assertIn(dependency["status"], ("Ready", "Complete"))
            self.assertEqual(job["template"]["spec"]["completionMode"], "Indexed")

    def test_the_pods_of_the_job_set_are_those_of_the_base(self):
        for name, pod in services_pods("overlays/jobset").items():
            base = copy.deepcopy(pods("base")[name])
            for item in base["spec"]["containers"][0]["env"]:
                if item["name"] == "ORDINAL":
                    item["valueFrom"]["fieldRef"]["fieldPath"] = "metadata.labels['batch.kubernetes.io/job-completion-index']"
            base["spec"]["restartPolicy"] = "Never"
            self.assertEqual(pod, base)


class Monitoring(unittest.TestCase):
    def test_the_rules_are_those_of_the_prometheus_folder(self):
        rule, = [document for document in documents(render_with_monitoring("base")) if document["kind"] == "PrometheusRule"]
        groups = []
        for name in ("rules.yaml", "alerts.yaml"):
            with open(os.path.join(promql.PROMETHEUS, name), encoding="utf-8") as file:
                groups += yaml.safe_load(file)["groups"]
        self.assertEqual(rule["spec"], {"groups": groups}, "run deploy/prometheus/wrap_rules.py")

    def test_the_monitor_finds_the_metrics_port_of_every_service(self):
        rendered = documents(render_with_monitoring("base"))
        monitor, = [document for document in rendered if document["kind"] == "PodMonitor"]
        endpoint, = monitor["spec"]["podMetricsEndpoints"]
        for name, pod in services_pods("base").items():
            self.assertTrue(selects(monitor["spec"]["selector"], pod["metadata"]["labels"]), name)
            self.assertIn(endpoint["port"], [port["name"] for port in pod["spec"]["containers"][0]["ports"]])
            self.assertEqual(pod["metadata"]["labels"][monitor["spec"]["jobLabel"]], "moonpipe", "alerts look for this job")
        self.assertIn({"action": "labeldrop", "regex": "container|endpoint"}, endpoint["relabelings"],
                      "they would split the sums of the recorded rules")

    def test_dashboards_come_as_a_labelled_config_map(self):
        config, = [document for document in documents(render_with_monitoring("base")) if document["metadata"]["name"] == "moonpipe-dashboards"]
        self.assertEqual(config["metadata"]["labels"]["grafana_dashboard"], "1")
        folder = os.path.join(ROOT, "deploy", "grafana", "dashboards")
        self.assertEqual(set(config["data"]), {name for name in os.listdir(folder) if name.endswith(".json")})
        for name, text in config["data"].items():
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                self.assertEqual(json.loads(text), json.load(file))


class Operations(unittest.TestCase):
    def setUp(self):
        with open(os.path.join(ROOT, "docs", "operations.md"), encoding="utf-8") as file:
            self.text = file.read()

    def test_commands_use_known_flags(self):
        known = known_flags()
        lines = re.findall(r"(moonpipe-[a-z]+(?:-[a-z]+)?|moonpipe (?:submit|status|watch|pause|resume|stop|save)) ([^`\n]*)", self.text)
        self.assertGreater(len(lines), 6)
        for program, rest in lines:
            given = set(re.findall(r"--[a-z-]+", rest))
            if given:
                self.assertLessEqual(given, known[program], program)

    def test_the_table_of_flags_is_the_list(self):
        table = set(re.findall(r"^\| `(--[a-z-]+)", self.text, re.MULTILINE))
        self.assertEqual(table, {flag for flags_of in known_flags().values() for flag in flags_of})

    def test_fields_of_the_run_file_exist(self):
        fields = proto_fields()
        sections = fields["TrainingRunSpec"]
        named = re.findall(r"`(" + "|".join(sections) + r")\.(\w+)`", self.text)
        self.assertGreater(len(named), 8)
        for section, field in named:
            if field not in ("yaml", "json"):
                self.assertIn(field, fields[sections[section]], section)

    def test_files_and_links_exist(self):
        headings = {re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", self.text, re.MULTILINE)}
        for anchor in re.findall(r"\(#([^)]*)\)", self.text):
            self.assertIn(anchor, headings)
        for path in re.findall(r"\bdeploy/[\w./-]*[\w/]", self.text):
            self.assertTrue(os.path.exists(os.path.join(ROOT, path)), path)

    def test_the_overlay_of_the_page_renders(self):
        text = re.search(r"```yaml\n(.*?)```", self.text, re.DOTALL).group(1)
        with tempfile.TemporaryDirectory() as work:
            path = os.path.relpath(ROOT, os.path.realpath(work))
            with open(os.path.join(work, "kustomization.yaml"), "w", encoding="utf-8") as file:
                file.write(re.sub(r"^   ", "", text, flags=re.MULTILINE).replace("PATH", path).replace("REGISTRY", "registry.example"))
            shutil.copy(os.path.join(KUSTOMIZE, "base", "run.yaml"), work)
            result = subprocess.run([KUBECTL, "kustomize", work], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        for document in documents(result.stdout):
            self.assertEqual(document["metadata"]["namespace"], "moonpipe")
        self.assertEqual(result.stdout.count("image: registry.example/moonpipe:0.1.0"), 4)


if __name__ == "__main__":
    if "--programs" in sys.argv:
        at = sys.argv.index("--programs")
        PROGRAMS = sys.argv[at + 1]
        del sys.argv[at:at + 2]
    if not KUBECTL or not yaml:
        print("skipped:", "kubectl is absent" if not KUBECTL else "PyYAML is absent")
        sys.exit(77)
    unittest.main()
