"""Serves a model with KServe's server: the Open Inference Protocol over REST and gRPC.

    python serve.py model.pte --port 8000

/v2/health/live and /v2/health/ready are for probes: nothing answers before the model has run.
POST /v2/models/model/infer takes tensors by name. /metrics is for Prometheus. Only this machine can
connect, unless --host names another address: everybody who can connect can run the model.
"""

from __future__ import annotations

import argparse

from purevk.integrations.http import MAX_BODY, MAX_WAITING
from purevk.integrations.kserve import ProgramModel, Server


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves a model with KServe's server.")
    parser.add_argument("model", help="a .pte or .pvk file")
    parser.add_argument("--name", default="model", help="of the model, in addresses")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: all")
    parser.add_argument("--port", type=int, default=8000, help="of REST")
    parser.add_argument("--grpc-port", type=int, default=8001, help="of gRPC")
    parser.add_argument("--max-body", type=int, default=MAX_BODY, help="bytes of a request")
    parser.add_argument(
        "--max-waiting", type=int, default=MAX_WAITING, help="requests in work at a time"
    )
    args = parser.parse_args()
    model = ProgramModel(args.name, args.model)
    print(f"{args.model} is ready on {model.worker.program.device.name}", flush=True)
    Server(
        host=args.host,
        http_port=args.port,
        grpc_port=args.grpc_port,
        max_body=args.max_body,
        max_waiting=args.max_waiting,
    ).start([model])


if __name__ == "__main__":
    main()
