# docker build -t autopar .
# docker build -t autopar --build-arg BASE=nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 --build-arg INDEX= .
ARG BASE=python:3.12-slim
FROM ${BASE}

# Wheels of torch for a CPU; empty for the ones of CUDA.
ARG INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN if ! command -v python3 >/dev/null || ! python3 -m venv --help >/dev/null; then \
      apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi
RUN python3 -m venv /opt/autopar
ENV PATH=/opt/autopar/bin:$PATH

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY autopar autopar
COPY policies policies
RUN pip install -c constraints.txt ${INDEX:+--extra-index-url ${INDEX}} ".[trainer,peft]"

WORKDIR /work
ENTRYPOINT ["autopar"]
CMD ["env"]
