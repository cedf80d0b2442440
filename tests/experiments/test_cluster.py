"""On a cluster that loses a machine, studies and bulk sampling leave the same files as in one process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import cluster
from limpet.experiments import ModelCache, local
from limpet.paper import studies


def forbidden():
    """Why there can be no namespaces here; "" if there can."""
    if sys.platform != "linux" or not (shutil.which("unshare") and shutil.which("ip")):
        return "this needs Linux, unshare and ip"
    bridge = ["ip", "link", "add", "bridge", "type", "bridge"]
    tried = subprocess.run([*cluster.command()[:-2], *bridge], capture_output=True, text=True)
    return tried.stderr.strip() or "namespaces are not permitted here" if tried.returncode else ""


@pytest.mark.long
@pytest.mark.parametrize("work", cluster.TASKS)
def test_a_cluster_that_loses_a_node_leaves_the_same_files(work, tmp_path):
    if why := forbidden():
        pytest.skip(why)
    assert not cluster.TASKS[work](tmp_path / "here", local(models=ModelCache()))
    there = cluster.command(work, str(tmp_path / "there"))
    done = subprocess.run(there, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"killed": True, "failed": {}}
    assert cluster.result_files(tmp_path / "there") == cluster.result_files(tmp_path / "here")


def test_the_page_on_scale_has_the_measured_numbers():
    root = Path(__file__).parents[2]
    page = (root / "docs/scale.md").read_text()
    measured = json.loads((root / "benchmarks/results/h200.json").read_text())
    for name, calls in (("native", 64), ("CRS", 64), ("native", 8), ("CRS", 8)):
        one = measured[f"batch 64 nfe {calls} {name}"]["tokens_per_second"] / 1024
        assert f"| {name}, {calls} | {one:.1f} | {1000 * one:,.0f} | {1e6 / one / 3600:.1f} |" in page
    crs = measured["batch 64 nfe 64 CRS"]
    text = " ".join(page.split())
    assert f"{1e6 * 1024 / crs['tokens_per_second'] / 1000:.0f} seconds of a thousand GPUs" in text
    assert f"64 samples at 64 calls takes {crs['seconds']:.1f} s" in text
    paper = [
        studies.study(name, studies.preset("paper")) for name in studies.STUDIES if name not in studies.NOT_IN_PAPER
    ]
    assert f"are {sum(len(one.cells) * len(one.seeds) for one in paper)} units" in text


def test_the_recipe_for_kuberay_is_whole():
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    spec = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])["spec"]
    cluster = spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {one["image"] for group in groups for one in group["template"]["spec"]["containers"]}
    assert len(images) == 1  # all run the same
    assert spec["entrypoint"].startswith("limpet paper study run all --preset paper --on ray --address auto")
