"""A cluster that is real: run as a program in namespaces of its own (see `command`), with a work's name and a folder,
it starts a Ray head and two nodes, each with a network, processes and temporary files of its own, does that work over
them, and takes a node's power away as soon as both have done something."""

import json
import os
import secrets
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from study_cases import small
from limpet.errors import LimpetError
from limpet.experiments import ModelCache, Store, bulk, run
from limpet.experiments.executors.ray import on_ray
from limpet.samplers import CRS

HEAD, PORT = "10.77.0.1", 6379
OWN = ["--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
STARTS = 60.0  # seconds that a node may take to join


def command(*arguments):
    """This program, where it is root and alone."""
    return ["unshare", "--user", "--map-root-user", *OWN, sys.executable, __file__, *arguments]


# What is done over a cluster, and here to compare with: a folder, a place, and whom to tell of what is done


def study(folder, place, on_progress=lambda progress: None):
    summary = run(small_study(seeds=tuple(range(1, 25))), Store(folder), place, ModelCache(), threads=1, on_progress=tell)
    return summary.failed


def samples(folder, place, on_progress=lambda pace: None):
    order = bulk.Order("exact:words", CRS(nfe=4), 2000, per_shard=100)
    return bulk.make(order, Store(folder), place, ModelCache(), threads=1, on_progress=tell).failed


WORKS = {"study": study, "samples": samples}  # whatever else runs on the lab's places belongs here


def made(folder):
    """All that a work leaves but its log, which tells who did what."""
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
    """A machine of its own on the wire: a process that, when it is killed, takes everything on it with it."""
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
    ip("link", "set", f"node{number}", "master", "wire", "up")
    return process


@contextmanager
def cluster(nodes):
    """A head that works on no_report, and nodes, joined; gives their processes."""
    # A node whose power is gone says nothing: let the head ask often. Whoever joins knows the cluster's own token.
    os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "2000",
                   "RAY_health_check_failure_threshold": "4", "PYTHONPATH": os.pathsep.join(sys.path),
                   "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # fmt: skip
    ip("link", "set", "lo", "up")
    ip("link", "add", "wire", "type", "bridge")
    ip("addr", "add", f"{HEAD}/24", "dev", "wire")
    ip("link", "set", "wire", "up")
    ip("route", "add", "default", "dev", "wire")
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
            """When two have logged what they did, one of them goes."""
            runners = list(Path(folder).glob("log/*.jsonl"))
            if not killed and len(runners) == 2:
                nodes[0].kill()
                killed.append(True)

        failed = WORKS[name](folder, on_ray(), kill)
    print(json.dumps({"killed": bool(killed), "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
