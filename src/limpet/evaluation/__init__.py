"""From samples to numbers: judges, metrics, statistics, and the comparison of samplers."""
