# kvpage in a container. Two targets:
#   docker build --target planner -t kvpage:planner .    plans and serves; no torch
#   docker build --target device -t kvpage:device .      the same, memory of NVIDIA GPUs, and torch
# Build arguments: PYTHON_IMAGE (may be pinned by digest), TORCH (what pip installs in `device`, such as
# torch==2.13.0+cpu from a configured source; the default is the CUDA build, several gigabytes; empty: no torch, which
# the service itself never imports), and for the labels REVISION and CREATED.
#
# docs/deployment.md says how to run it, and what of it has been run.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvpage kvpage
COPY server server
RUN pip install --no-cache-dir --constraint constraints.txt hatchling \
 && python -m hatchling build -t wheel -d /wheel

# The environments are made where pip is, without pip, and copied whole.
FROM ${PYTHON_IMAGE} AS environment
COPY --from=wheel /wheel /wheel
COPY constraints.txt /wheel/constraints.txt
RUN python -m venv --without-pip /venv

FROM environment AS planner-environment
RUN pip --python /venv/bin/python install --no-cache-dir --constraint /wheel/constraints.txt \
      "$(echo /wheel/kvpage-*.whl)[server]"

FROM environment AS device-environment
ARG TORCH=torch
# One command, so that torch and the driver's bindings agree on their versions.
RUN pip --python /venv/bin/python install --no-cache-dir --constraint /wheel/constraints.txt ${TORCH:+"${TORCH}"} \
      "$(echo /wheel/kvpage-*.whl)[server,cuda${TORCH:+,torch}]"

FROM ${PYTHON_IMAGE} AS base
RUN groupadd --gid 10001 kvpage \
 && useradd --uid 10001 --gid kvpage --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin kvpage \
 && install -d -o kvpage -g kvpage -m 0750 /run/kvpage
ENV PATH=/venv/bin:$PATH \
    KVPAGE_RUN_DIR=/run/kvpage \
    PYTHONDONTWRITEBYTECODE=1
VOLUME /run/kvpage
STOPSIGNAL SIGTERM
# Of the API process. A container that is a worker turns it off: docs/deployment.md.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["kvpage", "health"]
ENTRYPOINT ["kvpage"]
CMD ["serve"]
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="kvpage" \
      org.opencontainers.image.description="KV-cache page allocator service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

FROM base AS planner
COPY --from=planner-environment /venv /venv
USER 10001:10001

FROM base AS device
COPY --from=device-environment /venv /venv
USER 10001:10001
