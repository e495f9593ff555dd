# NVIDIA image: docker build -f docs/deploy/docker/cuda.Dockerfile -t pagoda:cuda .   (in a clone of the repository)
# docker run --gpus all --shm-size 2g -v models:/models -p 8000:8000 pagoda:cuda Qwen/Qwen3-8B --host 0.0.0.0
FROM python:3.12.12-slim-bookworm AS build
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

# torch's wheels bring the CUDA libraries; the driver comes from the host
FROM python:3.12.12-slim-bookworm
# a C compiler, with which Triton builds the launchers of its kernels
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/pagoda
ENV PATH=/opt/pagoda/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models XDG_CACHE_HOME=/models/cache TRITON_CACHE_DIR=/models/cache/triton
COPY --from=build /wheels /wheels
COPY constraints /constraints
RUN pip install --no-cache-dir -c /constraints/cuda.txt -c /constraints/server.txt "$(ls /wheels/pagoda-*.whl)[cuda,otlp,uvloop]"
RUN useradd --uid 1000 --create-home pagoda && mkdir /models && chown pagoda /models
USER pagoda
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=20m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["pagoda", "serve"]
CMD ["Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "8000", "--shutdown-timeout", "60", "--backend", "torch_cuda"]
