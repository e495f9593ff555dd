# Cloud TPU image: docker build -f docs/deploy/docker/tpu.Dockerfile -t pagoda:tpu .   (in a clone of the repository)
# docker run --privileged --net host --shm-size 16g -v models:/models pagoda:tpu Qwen/Qwen3-8B --host 0.0.0.0
FROM python:3.12.12-slim-bookworm AS build
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM python:3.12.12-slim-bookworm
RUN python -m venv /opt/pagoda
# compiled programs are kept beside the models: the second start compiles nothing
ENV PATH=/opt/pagoda/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models XDG_CACHE_HOME=/models/cache PAGODA_XLA_CACHE_PATH=/models/programs
COPY --from=build /wheels /wheels
COPY constraints /constraints
RUN pip install --no-cache-dir -c /constraints/tpu.txt -c /constraints/server.txt "$(ls /wheels/pagoda-*.whl)[tpu,otlp,uvloop]"
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# the user is root, which the devices /dev/accel* and /dev/vfio of a TPU VM belong to
HEALTHCHECK --start-period=60m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["pagoda", "serve"]
CMD ["Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "8000", "--shutdown-timeout", "60", "--backend", "jax_tpu"]
