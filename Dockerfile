# Tilewright with CUDA 13, as the playbook's containers have it.
#
#   docker build -t tilewright .
#   docker run --gpus all -it --rm -v tilewright-cache:/cache tilewright doctor
#
# Clean up: docker rmi tilewright; docker volume rm tilewright-cache. Containers that ran without
# --rm: docker rm $(docker ps -a --filter ancestor=tilewright --format '{{.ID}}')
FROM nvcr.io/nvidia/cuda:13.0.2-base-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/tilewright \
    PATH=/opt/tilewright/bin:$PATH \
    TILEWRIGHT_CACHE_DIR=/cache/tilewright \
    CUDA_TILE_CACHE_DIR=/cache/cutile \
    HF_HOME=/cache/huggingface
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src ./src
RUN python3 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir -c constraints.txt '.[cuda,models,serve]'

RUN useradd --create-home --uid 10001 tilewright && mkdir -p /cache && chown 10001 /cache
USER 10001
VOLUME /cache
ENTRYPOINT ["tilewright"]
CMD ["doctor"]
