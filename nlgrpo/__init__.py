"""nlgrpo: reinforcement learning of language models for the inference-time procedure that will be used."""

__version__ = "0.1.0"
