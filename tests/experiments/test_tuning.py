"""Tuning finds the best parameters, resumes after any stop, and reports on seeds that no choice has used."""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from limpet import CRS, Mend, Native
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.evaluation import statistics
from limpet.evaluation.statistics import Estimate
from limpet.experiments import ModelCache, Results, Store, collect, figures, local, resolve, run, tuning
from limpet.experiments.tuning import (
    Candidate,
    TuningConfig,
    candidate_samplers,
    crs_curve,
    curves_through,
    delta_nll,
    frontier,
    measured_candidates,
    parse_space,
    points,
    ranked,
    rungs,
    sampler_text,
    top_p_curve,
)
from limpet.samplers import Gibbs, find, named_samplers, params, parse

SMALL = "mend late_top_p=1,.6 budget=.25,1"
CONFIG = TuningConfig("exact:words", nfe=4, n=2, n_seeds=2, spaces=(SMALL,))
DOC = Path(__file__).parents[2] / "docs/tune.md"

numbers = st.floats(-10, 10).map(lambda x: round(x, 3))


# The space


def test_points_are_the_whole_space_once_and_the_first_ones_cover_it():
    default = parse_space(tuning.SPACE)
    every = [tuple(point.items()) for point in points(default)]
    assert len(every) == len(set(every)) == math.prod(map(len, default.values.values()))
    assert set(every) == {
        tuple(zip(default.values, values, strict=True)) for values in product(*default.values.values())
    }
    for param, values in default.values.items():
        counts = Counter(dict(point)[param] for point in every[:24])
        assert {counts[value] for value in values} == {24 // len(values)}, param  # no point came twice so early


def test_candidates_are_the_defaults_and_then_points_of_each_space_alternately():
    spaces = [parse_space("mend warmup=.2,.5"), parse_space("crs budget=.25,.5,1")]
    found = candidate_samplers(spaces, 8, 5)
    assert list(found)[:2] == ["mend", "crs"]
    assert {name.split()[0] for name in list(found)[2:4]} == {"mend", "crs"}
    assert all(sampler.nfe == 8 for sampler in found.values())
    every = candidate_samplers(spaces, 8, 100)
    assert list(found) == list(every)[:5]
    assert set(every) == {"mend", "mend warmup=0.2", "mend warmup=0.5", "crs", "crs budget=0.25", "crs budget=1.0"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mend late_topp=.9", "mend has no parameter 'late_topp'; did you mean late_top_p?"),
        ("mend .9", "it takes parameters with values, such as warmup=.2,.33"),
        ("mend warmup=.2,2", "has warmup 2.0; mend takes a number from 0 to 1"),
        ("mend revise=many", "has revise 'many'; mend takes None or a whole number from 0"),
        ("mend nfe=8,16", "samplers are compared at equal calls, which --nfe sets"),
        ("sharpen p=1", "there is no sampler 'sharpen'"),
        ("", "there is no sampler ''"),
    ],
)
def test_a_wrong_space_gets_one_sentence(text, message, tmp_path, capsys):
    with pytest.raises(LimpetError) as raised:
        parse_space(text)
    assert message in str(raised.value)
    assert main(["tune", "exact:words", "--space", text, "--store", str(tmp_path), "--out", f"{tmp_path}/a.toml"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_parameter_that_is_any_text_has_one_value():
    assert parse_space("gibbs predictor=native,top_p=.8").values == {"predictor": ("native,top_p=.8",)}
    assert parse_space("mend final_step=keep,argmax revise=None,2,2").values == {
        "final_step": ("keep", "argmax"),
        "revise": (None, 2),
    }


@given(st.data())
def test_the_text_of_a_sampler_is_parsed_as_the_same_sampler(data):
    spread = parse_space(tuning.SPACE + " final_step=keep,argmax,sample horizon=None,3 top_k=None,7")
    point = {param: data.draw(st.sampled_from(values)) for param, values in spread.values.items()}
    sampler = Mend(nfe=data.draw(st.integers(2, 64)), **point)
    assert parse(f"{sampler_text(sampler)} nfe={sampler.nfe}")[1] == sampler


# The rules of choice


@given(st.integers(1, 500), st.integers(1, 20))
def test_each_rung_has_a_third_of_the_candidates_on_three_times_the_seeds(count, n_seeds):
    ladder = rungs(count, n_seeds)
    assert ladder[0][0] == count
    assert ladder[-1][0] <= 3
    assert ladder[-1][1] >= n_seeds
    for (many, few), (left, more) in pairwise(ladder):
        assert left == -(-many // 3)
        assert few < more <= 3 * few


def test_the_default_rungs_are_those_whose_cost_is_stated():
    config = TuningConfig("mini")
    assert rungs(config.candidates, config.n_seeds) == [(24, 1), (8, 3), (3, 9)]


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=6), numbers)
def test_the_lowest_branch_is_the_least_of_all_segments_that_pass(nodes, x):
    parts = statistics.branches(*zip(*nodes, strict=True))
    assert [
        list(map(float, part[0])) for part in parts if (np.diff(part[0]) > 0).any() and (np.diff(part[0]) < 0).any()
    ] == []
    ys = []
    for (x0, y0), (x1, y1) in pairwise(nodes):
        if x0 != x1 and min(x0, x1) <= x <= max(x0, x1):
            ys.append(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    _, y, reason = statistics.lowest(parts, x)
    if ys:
        assert reason is None
        assert y == pytest.approx(min(ys), abs=1e-6)
    else:
        assert math.isnan(y)
        assert reason


def test_nodes_that_are_no_numbers_are_left_out_of_a_curve():
    ((xs, ys),) = statistics.branches([1, math.nan, 2, 3], [1, 1, math.nan, 5])
    assert (xs.tolist(), ys.tolist()) == ([1, 3], [1, 5])
    assert statistics.branches([1], [1]) == []


@given(st.lists(numbers, min_size=2, max_size=8))
def test_the_jackknife_of_a_mean_is_the_mean_and_its_error(values):
    found, plain = (
        statistics.jackknife(lambda kept: float(np.array(values)[kept].mean()), len(values)),
        statistics.mean_se(values),
    )
    assert found.mean == pytest.approx(plain.mean, abs=1e-9)
    assert found.se == pytest.approx(plain.se, abs=1e-9)


def test_the_jackknife_of_one_seed_has_no_error():
    found = statistics.jackknife(lambda kept: float(len(kept)), 1)
    assert found.mean == 1
    assert math.isnan(found.se)


def invented(truth, noise=0.0):
    """Results without samples: the curve of top-p has NLL twice its entropy, a candidate has what `truth` holds, and
    every seed some noise."""

    def measure(study):
        cells = {}
        for cell in study.sample_cells:
            entropy, below = truth[cell.name] if cell.name in truth else (2 + cell.sampler.top_p, 0.0)
            jitter = [noise * math.sin(seed * len(cell.name)) for seed in study.seeds]
            nll = np.array([2 * entropy + below + each for each in jitter])
            values = {"entropy": np.full(len(nll), entropy), "nll": nll, "rep-4": np.zeros(len(nll))}
            cells[cell.name] = {name: Estimate(value) for name, value in values.items()}
        return Results(study, {}, cells)

    return measure


TEXTS = list(candidate_samplers([parse_space(tuning.SPACE)], 8, 30))


@given(
    st.lists(st.tuples(st.floats(2.4, 3.0), st.floats(-1, 1)), min_size=30, max_size=30),
    st.one_of(st.none(), st.floats(2.5, 2.9)),
)
def test_without_noise_halving_finds_what_an_exhaustive_search_finds(table, wanted):
    truth = dict(zip(TEXTS, table, strict=True))
    config = TuningConfig("invented", 8, candidates=30, entropy=wanted, tolerance=0.1)
    near = [name for name, (entropy, _) in truth.items() if wanted is None or abs(entropy - wanted) <= 0.1]
    if not near:
        return
    best = min(truth[name][1] for name in near)
    found = tuning.tune(config, invented(truth))
    assert truth[found.winner][1] == pytest.approx(best, abs=1e-9)
    assert found.distances()["top-p"].mean == pytest.approx(best, abs=1e-9)
    assert [len(rung) for rung in found.rungs] == [30, 10, 4, 2]


def test_noise_smaller_than_the_differences_changes_nothing():
    truth = {name: (2.5 + i / 100, -0.1 * (i * 7 % 30)) for i, name in enumerate(TEXTS)}
    found = tuning.tune(TuningConfig("invented", 8, candidates=30), invented(truth, noise=0.04))
    assert truth[found.winner][1] == min(below for _, below in truth.values())
    assert found.distances()["top-p"].se > 0


def test_a_candidate_above_the_curve_is_compared_with_its_end_and_one_below_it_comes_last():
    truth = {"mend": (3.5, -0.9), "mend budget=0.5": (1.5, -9.0), "mend budget=0.25": (2.5, -0.1)}
    top = top_p_curve(8, "sample")
    study = TuningConfig("invented", 8).study("rung-1", {**top, **dict.fromkeys(truth, Mend(nfe=8))}, (0, 1))
    results = invented(truth)(study)
    found = ranked(measured_candidates(results, truth, curves_through(results, [top])), None, 0.1)
    assert [one.sampler for one in found] == ["mend budget=0.25", "mend", "mend budget=0.5"]
    assert found[0].delta_nll == pytest.approx(-0.1)
    assert found[1].delta_nll == pytest.approx(2 * 3.5 - 0.9 - 2 * 3)  # top-p 1 has entropy 3
    assert math.isnan(found[2].delta_nll)
    for one in found:
        assert delta_nll(results, one.sampler, top).mean == pytest.approx(one.delta_nll, nan_ok=True)


def test_the_frontier_is_what_no_other_sampler_beats_as_last_measured():
    found = [
        Candidate("a", 2.0, 1.0, 0, 1), Candidate("b", 3.0, 2.0, 0, 1), Candidate("c", 2.5, 2.5, 0, 1),
        Candidate("d", 3.0, 0.5, 0, 1), Candidate("d", 1.0, 0.5, 0, 2), Candidate("twin", 2.0, 1.0, 0, 1),
    ]  # fmt: skip
    assert [one.sampler for one in frontier(found)] == ["d", "a", "twin", "b"]


def test_an_entropy_out_of_reach_is_a_sentence():
    truth = dict.fromkeys(TEXTS, (2.6, 0.0))
    with pytest.raises(
        LimpetError, match=r"entropy 4 is out of reach: the 30 samplers have 2.6 to 2.6; ask for one in between"
    ):
        tuning.tune(TuningConfig("invented", 8, candidates=30, entropy=4.0), invented(truth))
    with pytest.raises(
        LimpetError, match=r"no sampler can be compared .* the 30 samplers have 1 to 1, and the curve of top-p 2.4 to 3"
    ):
        tuning.tune(TuningConfig("invented", 8, candidates=30), invented(dict.fromkeys(TEXTS, (1.0, 0.0))))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"candidates": 0}, "candidates is 0; it takes one or more"),
        ({"n": 0}, "n is 0"),
        ({"n_seeds": -1}, "n_seeds is -1"),
        ({"seed": 7}, "seed is 7; it takes an even number from 0"),
        ({"entropy": math.nan}, "entropy is nan; it takes nats above 0"),
        ({"tolerance": 0.0}, "tolerance is 0.0; it takes a number above 0"),
    ],
)
def test_a_wrong_configuration_is_a_sentence(wrong, message):
    with pytest.raises(LimpetError, match=re.escape(message)):
        TuningConfig("mini", **wrong)


# On an exact source


class Stopped(Exception):
    pass


def measuring(path, studies=None, stop=math.inf):
    """Runs studies on a store; it stops after some units."""
    models, store, count = ModelCache(), Store(path), Counter()

    def executor(config, groups):
        for event in local(models=models)(config, groups):
            assert event.error is None
            count["units"] += 1
            yield event
            if count["units"] == stop:
                raise Stopped

    def measure(study):
        if studies is not None:
            studies.append(study)
        assert not run(study, store, executor, models).failed
        return collect(study, store)

    return measure


def computed_in(path):
    """Every unit that was computed in a store, as often as it was."""
    return [json.loads(text)["unit"] for log in Path(path).glob("log/*") for text in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path, studies = tmp_path_factory.mktemp("undisturbed"), []
    return path, tuning.tune(CONFIG, measuring(path, studies)), studies


def test_halving_chooses_what_all_candidates_on_all_seeds_would(undisturbed):
    path, found, _ = undisturbed
    top, every = top_p_curve(4, "sample"), candidate_samplers([parse_space(SMALL)], 4, 24)
    curve = curves_through(measuring(path)(CONFIG.study("curve", top, CONFIG.seeds(1))), [top])
    results = measuring(path)(CONFIG.study("every", every, CONFIG.seeds(3)))
    assert found.winner == ranked(measured_candidates(results, every, curve), None, 1)[0].sampler


def test_fresh_seeds_are_none_that_a_choice_has_used(undisturbed):
    _, found, studies = undisturbed
    assert [study.name.split("-", 2)[2] for study in studies] == ["curve", "rung-1", "rung-2", "fresh"]
    models = ModelCache()
    *chosen, fresh = ({unit.seed for unit in resolve(study, models).units} for study in studies)
    assert fresh
    assert not fresh & set().union(*chosen)
    assert fresh == set(found.config.fresh_seeds) == set(found.fresh.study.seeds)
    many = TuningConfig("mini", n_seeds=50)
    assert not set(many.fresh_seeds) & set(many.seeds(1000))


@pytest.mark.parametrize("stop", [1, 9, 14, 30])
def test_a_stopped_tuning_is_resumed_and_finds_the_same(undisturbed, stop, tmp_path):
    _, found, _ = undisturbed
    with pytest.raises(Stopped):
        tuning.tune(CONFIG, measuring(tmp_path, stop=stop))
    assert len(computed_in(tmp_path)) == stop
    again = tuning.tune(CONFIG, measuring(tmp_path))
    assert json.dumps(again.to_dict()) == json.dumps(found.to_dict())
    assert max(Counter(computed_in(tmp_path)).values()) == 1
    before = len(computed_in(tmp_path))
    tuning.tune(CONFIG, measuring(tmp_path))
    assert len(computed_in(tmp_path)) == before


def test_more_candidates_compute_only_what_is_new(undisturbed, tmp_path):
    few = TuningConfig("exact:words", nfe=4, n=2, n_seeds=1, spaces=(SMALL,), candidates=2)
    tuning.tune(few, measuring(tmp_path))
    tuning.tune(replace(few, candidates=3), measuring(tmp_path))
    assert max(Counter(computed_in(tmp_path)).values()) == 1


# The command


def command(tmp_path, *more):
    options = ["--nfe", "4", "--n", "2", "--n-seeds", "2", "--space", SMALL, "--store", str(tmp_path / "store")]
    return ["tune", "exact:words", *options, *more, "--out", str(tmp_path / "tuned.toml")]


def test_the_command_writes_a_file_that_sampler_takes(undisturbed, tmp_path, capsys):
    _, found, _ = undisturbed
    assert main(command(tmp_path, "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["winner"] == found.text
    assert document["delta_nll"]["top-p"] == found.distances()["top-p"].to_dict()
    assert document["files"] == [str(tmp_path / "tuned.toml"), str(tmp_path / "tuned.svg")]
    assert (tmp_path / "tuned.svg").read_bytes().startswith(b"<?xml")
    file = str(tmp_path / "tuned.toml")
    assert named_samplers([file], 16) == {found.sampler.caption: found.sampler}  # the file sets its own calls
    assert parse(f"mine: {file} nfe=9 late-top-p=.7") == ("mine", found.sampler.replace(nfe=9, late_top_p=0.7))
    call = [
        "compare",
        "--model",
        "exact:words",
        "--n",
        "1",
        "--seeds",
        "1",
        "2",
        "--sampler",
        "native nfe=4",
        "--sampler",
        file,
    ]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samplers"][1]["sampler"] == found.sampler.to_dict()
    written = Path(file).read_bytes()
    assert main(command(tmp_path)) == 0
    shown = capsys.readouterr()
    assert Path(file).read_bytes() == written
    assert f'--sampler "{found.text}"' in shown.out
    assert "the best of 5 samplers" in shown.out
    assert "on fresh seeds: 2 seeds x 2 samples" in shown.out
    assert "0 units computed" in shown.err


def test_without_matplotlib_there_is_no_figure(tmp_path, capsys, monkeypatch):
    def none(module, name):
        raise LimpetError(f"this needs {module}: pip install 'limpet[{name}]'")

    monkeypatch.setattr(figures, "import_extra", none)
    assert main(command(tmp_path)) == 0
    shown = capsys.readouterr()
    assert "no figure: this needs matplotlib" in shown.err
    assert "on fresh seeds" in shown.out
    assert (tmp_path / "tuned.toml").is_file()
    assert not (tmp_path / "tuned.svg").exists()


def test_an_entropy_out_of_reach_is_a_sentence_of_the_command(tmp_path, capsys):
    assert main(command(tmp_path, "--entropy", "9")) == 2
    printed = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(r"limpet: entropy 9 is out of reach: the 5 samplers have .*--space", printed)
    assert not (tmp_path / "tuned.toml").exists()


def test_the_file_of_another_tuning_is_overwritten_by_force_alone(tmp_path, capsys):
    file = tmp_path / "tuned.toml"
    file.write_text('sampler = "mend"')
    assert main(command(tmp_path)) == 2
    assert "exists and is of another tuning: name another file, or overwrite it with --force" in capsys.readouterr().err
    assert file.read_text() == 'sampler = "mend"'
    assert not (tmp_path / "store").exists()
    assert main(command(tmp_path, "--force")) == 0
    assert file.read_text() != 'sampler = "mend"'


@pytest.mark.parametrize("out", ["tuned.txt", "none/tuned.toml"])
def test_an_impossible_file_is_reported_before_any_work(tmp_path, capsys, out):
    assert main([*command(tmp_path)[:-1], str(tmp_path / out)]) == 2
    assert "it takes a file that ends in .toml, in a folder that exists" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


MINE = """from dataclasses import dataclass

from limpet import Native, param


@dataclass(frozen=True)
class Mine(Native):
    depth: int = param(3, "Nothing at all.", low=1)
"""


def test_a_users_sampler_is_found_from_the_file(here):
    (here / "mine.py").write_text(MINE)
    (here / "kept").mkdir()
    call = command(here)
    call[call.index(SMALL)] = "./mine.py:Mine depth=2 top_p=.5,.8"
    assert main([*call[:-1], "kept/tuned.toml"]) == 0
    assert 'sampler = "../mine.py:Mine' in (here / "kept/tuned.toml").read_text()
    (sampler,) = named_samplers(["kept/tuned.toml"]).values()
    assert type(sampler).__name__ == "Mine"
    assert sampler.nfe == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampler = 'mend", "a.toml is not TOML"),
        ("", "a.toml: the file has {}; it takes sampler"),
        ("sampler = 3", "sampler: sampler is 3; it takes a text"),
        ("sampler = 'mend'\nrun = 'rm'", "run: the file has no field 'run'"),
        ("sampler = 'mend budgt=1'", "sampler: mend has no parameter 'budgt'; did you mean budget?"),
        ("sampler = 'mend budget=-1'", "sampler: mend has budget -1.0; it takes a number from 0"),
        ("sampler = 'mend nfe'", "sampler: sampler 'mend nfe' has 'nfe'"),
        ("sampler = 'a.toml'", "sampler: there is no sampler 'a.toml'"),
        ("sampler = './none.py:Mine'", "check the path before the colon"),
        (b"sampler = '\xff'", "cannot be read"),
        (None, "name a file that limpet tune wrote"),
    ],
)
def test_a_file_without_a_sampler_gets_one_sentence(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("a.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LimpetError) as raised:
        parse("a.toml", nfe=16)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("predictor", ["a.toml", "a: a.toml", "./a.py:A", "a: ./a.py:A", "gibbs,predictor=./a.py:A"])
def test_no_file_is_opened_for_a_parameter(predictor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("raise SystemExit")
    Path("a.toml").write_text("secret = 'kept'")
    with pytest.raises(LimpetError, match="it takes the name of a sampler, not a file"):
        Gibbs(predictor=predictor)


def test_the_page_shows_a_command_that_runs_and_a_file_that_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIMPET_HOME", str(tmp_path / "home"))
    page = DOC.read_text(encoding="utf-8")
    shown = re.findall(r"^\$ limpet (tune exact:.*)$", page, re.MULTILINE)
    assert shown
    for command in shown:
        assert main(shlex.split(command)) == 0
    assert "on fresh seeds" in capsys.readouterr().out
    dial, block = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert tomllib.loads(dial).keys() == tomllib.loads(next((tmp_path / "home/dials").iterdir()).read_text()).keys()
    Path("sharp.toml").write_text(block)
    for text in ["sharp.toml", *re.findall(r'--sampler "(sharp.*?)"', page)]:
        assert isinstance(parse(text)[1], Mend)


def test_the_curves_have_their_final_steps():
    assert all(isinstance(one, Native) and one.final_step == "sample" for one in top_p_curve(8, "sample").values())
    assert all(isinstance(one, CRS) and one.final_step == "keep" for one in crs_curve(8).values())
    for name, sampler in {**top_p_curve(8, "argmax"), **crs_curve(8)}.items():
        assert parse(name, nfe=8)[1] == sampler
    assert all(param in params(find("mend")) for param in parse_space(tuning.SPACE).values)
