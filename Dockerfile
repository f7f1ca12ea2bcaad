# pageserve in a container.
#   docker build -t pageserve .                                         for NVIDIA GPUs (and it runs on CPUs)
#   docker build -t pageserve:cpu --build-arg TORCH_INDEX=URL .         for CPUs, several GB smaller; pytorch.org's install
#                                                                       page shows the URL of the index of CPU wheels
#   docker run --rm --gpus all -p 8000:8000 -e PAGESERVE_API_KEY=YOUR_KEY -v cache:/cache pageserve serve Qwen/Qwen3-0.6B
# A container listens on all its addresses, so it needs an API key, or PAGESERVE_ALLOW_UNAUTHENTICATED=true together with
# -p 127.0.0.1:8000:8000.
# BASE may be any Debian image whose `python` is 3.10 or newer and has pip, also one pinned by digest.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# tini is PID 1: it forwards SIGTERM and reaps children. Triton compiles a small launcher per kernel with gcc and libc6-dev.
# Versions are those of the base image's Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 pageserve \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin pageserve \
    && install --directory --owner=10001 --group=10001 /cache

# Dependencies change rarely and the source often, so each has its own layer, the largest first. Where BASE has Debian's
# own Python, pip installs beside Debian's packages only if PIP_BREAK_SYSTEM_PACKAGES says so.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/pageserve
COPY pyproject.toml deploy/requirements.py ./
ARG TORCH_INDEX=""
RUN python requirements.py torch > torch.txt \
    && pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement torch.txt
RUN python requirements.py > rest.txt \
    && pip install --no-cache-dir --requirement rest.txt
COPY README.md ./
COPY kernels ./kernels
COPY engine ./engine
COPY server ./server
RUN pip install --no-cache-dir --no-deps .

# The root file system may be read-only: the server writes only to /cache (keep it in a volume) and /tmp.
ENV HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    PYTHONUNBUFFERED=1 \
    PAGESERVE_HOST=0.0.0.0 \
    PAGESERVE_PORT=8000
VOLUME /cache
WORKDIR /cache
# The machine code of the CPU kernels, for processors such as this one. A server on another processor compiles its own and
# keeps it in $HOME.
RUN python -m kernels.warmup
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"PAGESERVE_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "pageserve"]
CMD ["serve"]
