# Cloud TPU image: docker build -f docs/deploy/docker/tpu.Dockerfile -t pagoda:tpu .   (in a clone of the repository)
# docker run --privileged --net host --shm-size 16g -v models:/models pagoda:tpu Qwen/Qwen3-8B --host 0.0.0.0
FROM python:3.12-slim AS build
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
RUN python -m venv /opt/pagoda
# compiled programs are kept beside the models: the second start compiles nothing
ENV PATH=/opt/pagoda/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models PAGODA_XLA_CACHE_PATH=/models/programs
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/pagoda-*.whl)[tpu,otlp,uvloop]"
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
# the user is root, which the devices /dev/accel* and /dev/vfio of a TPU VM belong to
HEALTHCHECK --start-period=60m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["pagoda", "serve"]
CMD ["Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port", "8000", "--shutdown-timeout", "60", "--backend", "jax_tpu"]
