"""A real cluster: run as a program in namespaces of its own (see `command`), with the name of a task and a folder, it
starts a Ray head and two nodes, each with its own network, processes and temporary files, runs the task on them, and
kills one node as soon as both have computed something."""

import json
import os
import secrets
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from limpet.errors import LimpetError
from limpet.experiments import ModelCache, Store, bulk, on_ray, run
from limpet.samplers import CRS
from study_cases import small_study

HEAD, PORT = "10.77.0.1", 6379
OWN = ["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
STARTS = 60.0  # seconds that a node may take to join


def command(*arguments):
    """This program, where it is root and alone."""
    return ["unshare", "--user", "--map-root-user", *OWN, sys.executable, __file__, *arguments]


# Tasks: each takes a folder, an executor and a function that is called with the progress


def study(folder, executor, on_progress=lambda progress: None):
    one = small_study(seeds=tuple(range(1, 25)))
    return run(one, Store(folder), executor, ModelCache(), threads=1, on_progress=on_progress).failed


def samples(folder, executor, on_progress=lambda progress: None):
    request = bulk.BulkRequest("exact:words", CRS(nfe=4), 2000, part_size=100)
    return bulk.generate(request, Store(folder), executor, ModelCache(), threads=1, on_progress=on_progress).failed


TASKS = {"study": study, "samples": samples}


def result_files(folder):
    """All files of a task but its log, which names the runners."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != "log"
    }


# The cluster


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def starting(*more):
    """The command that begins a node and stays with it, in a folder for Ray that nobody else sees."""
    ray = [Path(sys.executable).parent / "ray", "start", "--block", "--disable-usage-stats", *more]
    memory = ["--object-store-memory", str(100 << 20)]
    return "mkdir -p /tmp/ray && mount -t tmpfs ray /tmp/ray && exec " + " ".join(map(str, [*ray, *memory]))


def node(number):
    """A node with its own network: killing its process kills everything on it."""
    address = f"10.77.0.{number + 2}"
    script = (
        "while ! ip link show eth0 > /dev/null 2>&1; do sleep .05; done; ip link set lo up; "
        f"ip addr add {address}/24 dev eth0; ip link set eth0 up; ip route add default dev eth0; "
    ) + starting(f"--address={HEAD}:{PORT}", f"--node-ip-address={address}", "--num-cpus=1")
    process = subprocess.Popen(["unshare", *OWN, "sh", "-c", script], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (inside := children.read_text().split()):
        time.sleep(0.01)
    ip("link", "add", f"node{number}", "type", "veth", "peer", "name", "eth0", "netns", inside[0])
    ip("link", "set", f"node{number}", "master", "bridge", "up")
    return process


@contextmanager
def cluster(nodes):
    """A head that computes nothing, and nodes that have joined it; yields the nodes' processes."""
    # The head asks its nodes often whether they live. Nodes join with the cluster's own token.
    os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "2000",
                   "RAY_health_check_failure_threshold": "4", "PYTHONPATH": os.pathsep.join(sys.path),
                   "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # fmt: skip
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("addr", "add", f"{HEAD}/24", "dev", "bridge")
    ip("link", "set", "bridge", "up")
    ip("route", "add", "default", "dev", "bridge")
    head = starting(
        "--head", f"--node-ip-address={HEAD}", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"
    )
    started = [subprocess.Popen(["sh", "-c", head], stdout=subprocess.DEVNULL)]
    try:
        started += [node(number) for number in range(nodes)]
        import ray

        ends = time.monotonic() + STARTS
        while True:
            with suppress(ConnectionError, RuntimeError, ValueError):
                ray.init(address=f"{HEAD}:{PORT}", log_to_driver=False, logging_level=50)
                break
            if time.monotonic() > ends:
                raise LimpetError("the head did not start")
            time.sleep(0.5)
        while ray.cluster_resources().get("CPU", 0) < nodes:
            if time.monotonic() > ends:
                raise LimpetError("the nodes did not join")
            time.sleep(0.2)
        yield started[1:]
        ray.shutdown()
    finally:
        for process in started:
            process.kill()


def main(name, folder):
    with cluster(2) as nodes:
        killed = []

        def kill(progress):
            """Kill one node when two have logged units."""
            runners = list(Path(folder).glob("log/*.jsonl"))
            if not killed and len(runners) == 2:
                nodes[0].kill()
                killed.append(True)

        failed = TASKS[name](folder, on_ray(), kill)
    print(json.dumps({"killed": bool(killed), "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
