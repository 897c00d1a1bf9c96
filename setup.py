"""Packaging that pyproject.toml cannot say: ``kernels/`` at the top of the tree is the package ``nlgrpo.kernels``."""

from setuptools import setup

setup(
    packages=["nlgrpo", "nlgrpo.kernels"],
    package_dir={"nlgrpo.kernels": "kernels"},
    package_data={"nlgrpo": ["assets/**/*"]},
)
