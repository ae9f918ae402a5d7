# Run a learner in a container:
#   docker build -t cadam .
#   docker run -v "$PWD":/data -p 127.0.0.1:8000:8000 cadam run clicks.csv --label click --status 0.0.0.0:8000
FROM python:3.12 AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# PIP_INDEX_URL selects the package index, for example one with CPU builds of torch, which are much smaller.
ARG PIP_INDEX_URL
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/cadam-*.whl)[redis,kafka]" && rm -r /wheels \
    && useradd --create-home learner
USER learner
WORKDIR /data
ENTRYPOINT ["cadam"]
CMD ["--help"]
