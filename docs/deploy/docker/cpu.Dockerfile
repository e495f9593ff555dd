# CPU image: docker build -f docs/deploy/docker/cpu.Dockerfile -t pagoda:cpu .   (in a clone of the repository)
FROM python:3.12.12-slim-bookworm AS build
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM python:3.12.12-slim-bookworm
RUN python -m venv /opt/pagoda
ENV PATH=/opt/pagoda/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/models XDG_CACHE_HOME=/models/cache
COPY constraints /constraints
# torch from PyTorch's index for CPUs: that of PyPI brings several GB of CUDA libraries
RUN pip install --no-cache-dir -c /constraints/cpu.txt torch --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir -c /constraints/cpu.txt -c /constraints/server.txt "$(ls /wheels/pagoda-*.whl)[cpu,otlp,uvloop]"
RUN useradd --uid 1000 --create-home pagoda && mkdir /models && chown pagoda /models
USER pagoda
VOLUME /models
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["pagoda", "serve"]
CMD ["HuggingFaceTB/SmolLM2-135M-Instruct", "--host", "0.0.0.0", "--port", "8000", "--shutdown-timeout", "60"]
