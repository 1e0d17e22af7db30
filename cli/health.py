"""`python -m cli.health [HOST:PORT [SERVICE]]`: the health check of a container; exits with 0 if the member is ready.

With SERVICE `liveness` it exits with 0 if the member is alive. Without an address it checks the health port, if
TANDEM_HEALTH_PORT is set. Imports gRPC and nothing of Tandem, because it starts every few seconds next to the member.
"""

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_DEFAULT_ADDRESS = "127.0.0.1:50051"
_TIMEOUT_S = 2.5
_OPTIONS: list[tuple[str, object]] = [("grpc.enable_http_proxy", 0)]


def main(arguments: list[str]) -> int:
    health_port = os.environ.get("TANDEM_HEALTH_PORT")
    has_port = bool(health_port) and not arguments
    address = f"127.0.0.1:{health_port}" if has_port else (arguments or [_DEFAULT_ADDRESS])[0]
    service = arguments[1] if len(arguments) > 1 else ""
    try:
        with _plain_channel(address) if has_port else _channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        sys.stderr.write(f"{address}: {error.code().name}: {error.details()}\n")
        return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.stderr.write(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}\n")
        return 1
    return 0


def _channel(address: str) -> grpc.Channel:
    """Use the member's own certificate if the environment names it."""
    ca, key, cert = (os.environ.get(f"TANDEM_TLS_{name}") for name in ("CA", "KEY", "CERT"))
    if not (ca and key and cert):
        return _plain_channel(address)
    credentials = grpc.ssl_channel_credentials(*(Path(path).read_bytes() for path in (ca, key, cert)))
    name = os.environ.get("TANDEM_TLS_SERVER_NAME", "")
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", name)] if name else _OPTIONS
    return grpc.secure_channel(address, credentials, options=options)


def _plain_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=_OPTIONS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
