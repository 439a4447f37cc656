# kvpage in a container. Two targets:
#   docker build --target planner -t kvpage:planner .    plans and serves; no torch
#   docker build --target device -t kvpage:device .      the same and torch, for examples and tensor clients
# Build arguments: PYTHON_IMAGE (may be pinned by digest) and, for `device`, TORCH: what pip installs, such as
# torch==2.13.0+cpu from a configured source. The default is the CUDA build, several gigabytes.
#
# The worker outlives the API only where it is not killed with it: run `kvpage worker --device D` as the command of a
# container of its own beside one with `kvpage serve`, both with the same /run/kvpage volume.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvpage kvpage
COPY server server
RUN pip install --no-cache-dir --constraint constraints.txt hatchling \
 && python -m hatchling build -t wheel -d /wheel

FROM ${PYTHON_IMAGE} AS base
COPY --from=wheel /wheel /wheel
COPY constraints.txt /wheel/constraints.txt
RUN groupadd --gid 10001 kvpage \
 && useradd --uid 10001 --gid kvpage --no-create-home --shell /usr/sbin/nologin kvpage \
 && install -d -o kvpage -g kvpage -m 0750 /run/kvpage
ENV KVPAGE_RUN_DIR=/run/kvpage
VOLUME /run/kvpage
STOPSIGNAL SIGTERM
# No HEALTHCHECK: the image has no `kvpage health` yet, and a shell with curl is not worth its size. Orchestrators can
# ask /livez and /readyz.
ENTRYPOINT ["kvpage"]
CMD ["serve"]

FROM base AS planner
RUN pip install --no-cache-dir --constraint /wheel/constraints.txt "$(echo /wheel/kvpage-*.whl)[server]"
USER 10001:10001

FROM base AS device
ARG TORCH=torch
# The build argument decides, and may pin.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "${TORCH}" \
 && pip install --no-cache-dir --constraint /wheel/constraints.txt "$(echo /wheel/kvpage-*.whl)[server,torch]"
USER 10001:10001
