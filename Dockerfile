# docker build -t trefoil . && docker run --rm trefoil check --cases 1000
# With GPUs: docker run --rm --gpus all --shm-size 8g -v NCCL_FOLDER:/nccl -e LD_LIBRARY_PATH=/nccl trefoil check --gpu
# Without the GPU library: --build-arg PACKAGE=--cpu
FROM debian:12 AS build
ARG PACKAGE=
WORKDIR /trefoil
COPY . .
RUN tools/package $PACKAGE && mkdir /opt/trefoil && tar xzf out/trefoil-*.tar.gz -C /opt/trefoil --strip-components 1

FROM debian:12-slim
COPY --from=build /opt/trefoil /opt/trefoil
ENV PATH=/opt/trefoil/bin:$PATH
RUN trefoil check --cases 100
ENTRYPOINT ["trefoil"]
