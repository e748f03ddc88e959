# The command `windtunnel` with its loops compiled: docker build --tag windtunnel .
#     docker run --rm windtunnel simulate --model llama-3.1-8b --device h100_sxm --input-tokens 1024 --output-tokens 256 --concurrency 32
#     docker run --rm --volume "$PWD:/work" windtunnel simulate scenario.yaml --html run.html
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# Extras: --build-arg EXTRAS=dashboard,bench,pandas
ARG EXTRAS=dashboard
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/windtunnel-*.whl)[$EXTRAS]" && rm -r /wheels \
    && useradd --create-home windtunnel && install --directory --mode 1777 /work /var/cache/windtunnel
# Machine code for any processor of this kind, so that what is compiled here serves on every machine. A container may run
# as another user, who has no home.
ENV NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES= XDG_CACHE_HOME=/var/cache/windtunnel PYTHONUNBUFFERED=1
USER windtunnel
WORKDIR /work
# The usual forms of the serving loop, and the search for the greatest load.
RUN windtunnel warm && chmod --recursive a+rwX /var/cache/windtunnel
ENTRYPOINT ["windtunnel"]
CMD ["--help"]
