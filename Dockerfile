# syntax=docker/dockerfile:1
# CPU:  docker build --target cpu --tag nlgrpo:cpu .
# CUDA: docker build --target cuda --tag nlgrpo:cuda .      docker run --gpus all --shm-size 8g nlgrpo:cuda nlgrpo doctor
# vLLM: docker build --target cuda --build-arg EXTRAS=vllm --tag nlgrpo:vllm .

ARG PYTHON=3.12

# The wheel, with the compiled CPU ops. They use stable ABIs, so one wheel is right for both images.
FROM python:${PYTHON}-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /nlgrpo
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
        setuptools torch numpy
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc csrc
COPY kernels kernels
COPY nlgrpo nlgrpo
RUN NLGRPO_BUILD_EXT=1 pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 HF_HOME=/data/huggingface
RUN useradd --create-home --uid 1000 nlgrpo && mkdir /data && chown nlgrpo /data
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /wheels
WORKDIR /data

FROM base AS cpu
ARG EXTRAS=tensorboard
# torchrun uses the CPU build of torch, which is on PyTorch's own index.
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu torch "$(echo /wheels/*.whl)[${EXTRAS}]"
USER 1000
CMD ["nlgrpo", "--help"]

FROM base AS cuda
ARG EXTRAS=tensorboard
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Triton compiles the launchers of its kernels with a C compiler when they first run. PyPI's torch brings CUDA's libraries.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt torch "$(echo /wheels/*.whl)[${EXTRAS}]"
USER 1000
CMD ["nlgrpo", "--help"]
