"""Faults that tests of `nlgrpo verify` plant in objectives and updates."""

from nlgrpo.objectives import Mean


def decreasing(self, z):
    return 1 - (1 - z) ** self.n


def too_far(log_pi, linear, log_ref, *, L, beta):
    return ((L * log_pi + beta * log_ref + 60 * linear) / (L + beta)).log_softmax(-1)


def of_the_mean(self, rewards, probs=None):
    return Mean().linearize(rewards, probs)
