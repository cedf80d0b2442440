"""Over a cluster of machines of their own, one of which dies on the way, work leaves the bytes that it leaves here."""

import json
import shutil
import subprocess
import sys

import pytest

import cluster
from limpet.lab import Shelf
from limpet.lab.places import local


def forbidden():
    """Why namespaces cannot be had here, or nothing."""
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("ip")):
        return "this needs Linux, unshare and ip"
    wire = ["ip", "link", "add", "wire", "type", "bridge"]
    tried = subprocess.run([*cluster.command()[:-2], *wire], capture_output=True, text=True)
    return tried.stderr.strip() or "namespaces are not to be had here" if tried.returncode else ""


@pytest.mark.long
@pytest.mark.parametrize("work", cluster.WORKS)
def test_a_cluster_that_loses_a_node_makes_the_same_bytes(work, tmp_path):
    if why := forbidden():
        pytest.skip(why)
    assert not cluster.WORKS[work](tmp_path / "here", local(shelf=Shelf()))
    there = cluster.command(work, str(tmp_path / "there"))
    done = subprocess.run(there, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"killed": True, "failed": {}}
    assert cluster.made(tmp_path / "there") == cluster.made(tmp_path / "here")
