"""Numbers of evaluations, without a run."""

from nlgrpo.objectives.aggregation import WeightedSum
from nlgrpo.objectives.registry import parse
from nlgrpo.training import evaluation_values
from nlgrpo.training.global_batch import JointObjective


def metrics_of(sampled, ns):
    """The numbers as trackers get them: {"eval_reward": 0.5, "eval_reward_low": 0.4, ..}."""
    objectives = {name: parse(text) for name, text in sampled.objectives.items()}
    aggregate = WeightedSum(list(sampled.weights.values()))
    joint = JointObjective(objectives, sampled.weights, aggregate, "batch", 0.0)
    return evaluation_values.metrics(evaluation_values.values_of(sampled, sampled, joint, ns), sampled)
