# dapo for machines with NVIDIA GPUs, with vLLM in an environment of its own. docs/machines.md says how it is built and run.
# The tag is fixed; a build that must be the same next year names the digest: --build-arg BASE=nvidia/cuda@sha256:...
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE}

COPY docker/install.sh /source/docker/install.sh
RUN /source/docker/install.sh system
RUN /source/docker/install.sh environment
RUN /source/docker/install.sh torch cuda
RUN /source/docker/install.sh vllm

# versions first, so that a change of the source alone leaves the layers above as they are
COPY pyproject.toml constraints.txt /source/
RUN /source/docker/install.sh dependencies

COPY README.md LICENSE setup.py /source/
COPY src /source/src
COPY configs /source/configs
COPY benchmarks /source/benchmarks
RUN /source/docker/install.sh dapo
RUN /source/docker/install.sh check

ENV PATH=/opt/dapo/bin:$PATH VLLM_PYTHON=/opt/vllm/bin/python
RUN /source/docker/install.sh user
USER dapo
WORKDIR /work
CMD ["dapo", "--help"]
