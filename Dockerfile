# A server of a trained model (docs/serve.md):
#   docker build -t vit .                                   for CPUs
#   docker build -t vit:cuda --build-arg DEVICE=cuda .      for NVIDIA GPUs
#   docker run -p 127.0.0.1:8000:8000 -v "$PWD/runs/photos:/model:ro" vit
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY LICENSE NOTICE README.md pyproject.toml ./
COPY vit ./vit
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG DEVICE=cpu
# both from one index: torchvision of another one does not import beside a CPU-only torch
RUN case "$DEVICE" in \
        cpu) pip install --no-cache-dir torch torchvision --index-url https://download.pytorch.org/whl/cpu ;; \
        cuda) pip install --no-cache-dir torch torchvision ;; \
        *) echo "DEVICE=$DEVICE: give cpu or cuda" >&2; exit 1 ;; \
    esac
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)[serve,onnx]"

ENV PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid 10001 --create-home vit
USER 10001
WORKDIR /home/vit
EXPOSE 8000
HEALTHCHECK --start-period=60s --interval=15s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["vit", "serve", "--host", "0.0.0.0"]
CMD ["/model"]
