"""From samples to numbers: judges, metrics, checkers and statistics; `evaluate` samples, `compare` samplers."""

from limpet.evaluation.checkers import Checker, find_checker
from limpet.evaluation.comparison import Comparison, SamplerScores, compare
from limpet.evaluation.controls import control_sets, heldout_text, reference_set
from limpet.evaluation.judges import Judge, JudgeScores, ScoreCache, load_judge, source_judge
from limpet.evaluation.metrics import METRICS
from limpet.evaluation.sample_sets import SampleSet, convention_for, text_pieces
from limpet.evaluation.scores import NLL, PERPLEXITY, Measure, Scores, evaluate, features
from limpet.evaluation.statistics import Estimate, Floats, hull, interpolate, lowest, mean_se, paired

__all__ = [
    "METRICS", "NLL", "PERPLEXITY", "Checker", "Comparison", "Estimate", "Floats", "Judge", "JudgeScores", "Measure",
    "SampleSet", "SamplerScores", "ScoreCache", "Scores", "compare", "control_sets", "convention_for", "evaluate",
    "features", "find_checker", "heldout_text", "hull", "interpolate", "load_judge", "lowest", "mean_se", "paired",
    "reference_set", "source_judge", "text_pieces",
]  # fmt: skip
