"""Serves a model with KServe's server: the Open Inference Protocol over REST and gRPC.

    python serve.py model.pte --port 8000

/v2/health/live and /v2/health/ready are for probes: nothing answers before the model has run.
POST /v2/models/model/infer takes tensors by name. /metrics is for Prometheus.
"""

from __future__ import annotations

import argparse

import kserve

from purevk.integrations.kserve import ProgramModel


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model with KServe's server.")
    parser.add_argument("model", help="a .pte or .pvk file")
    parser.add_argument("--name", default="model", help="of the model, in addresses")
    parser.add_argument("--port", type=int, default=8000, help="of REST")
    parser.add_argument("--grpc-port", type=int, default=8001, help="of gRPC")
    args = parser.parse_args()
    model = ProgramModel(args.name, args.model)
    print(f"{args.model} is ready on {model.worker.program.device.name}", flush=True)
    kserve.ModelServer(http_port=args.port, grpc_port=args.grpc_port).start([model])


if __name__ == "__main__":
    main()
