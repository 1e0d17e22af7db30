"""`python -m cli.health [HOST:PORT]`: exit 0 when the member there is ready. What a container's health check runs.

Imports gRPC and nothing of Tandem: it starts every few seconds beside the process it asks.
"""

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_DEFAULT_ADDRESS = "127.0.0.1:50051"
_TIMEOUT_S = 2.5


def main(arguments: list[str]) -> int:
    address = arguments[0] if arguments else _DEFAULT_ADDRESS
    try:
        with _channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        sys.stderr.write(f"{address}: {error}\n")
        return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _channel(address: str) -> grpc.Channel:
    """With the certificate that the member itself has, where its settings are in the environment."""
    options = [("grpc.enable_http_proxy", 0)]
    ca, key, cert = (os.environ.get(f"TANDEM_TLS_{name}") for name in ("CA", "KEY", "CERT"))
    if not (ca and key and cert):
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in (ca, key, cert)))
    return grpc.secure_channel(address, credentials, options=options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
