# Not built where this file was written: that machine has neither a GPU nor a container runtime.
# docker build -t ssdtrain . && docker run --gpus all --ulimit memlock=-1 -v /mnt/nvme:/scratch ssdtrain ssdtrain doctor /scratch
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends python3-dev python3-venv gcc && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN pip install --no-cache-dir torch setuptools --index-url https://download.pytorch.org/whl/cu128
COPY . /src
RUN pip install --no-cache-dir "/src[deepspeed,plot]" && rm -r /src
WORKDIR /work
