"""Direct looks at a worker that do not trust any open connection."""

import asyncio
import contextlib

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.observe.health import LIVENESS
from tandem.channel import explained

_TIMEOUT_S = 1.0


async def answers(channel: grpc.aio.Channel, timeout_s: float = _TIMEOUT_S) -> bool:
    """Its gRPC server answers, and says that it lives. Whether it takes new work is the registry's word, not this."""
    return not await silence(channel, timeout_s)


async def silence(channel: grpc.aio.Channel, timeout_s: float = _TIMEOUT_S) -> str:
    """Why its gRPC server does not answer, or that it is stuck; empty when all is well."""
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        answer = await check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return ""  # of a version that knows no such service, and answers all the same
        return explained(error.details() or error.code().name)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it says that it is unhealthy"


async def nobody_listens(address: str) -> bool:
    """The host refuses connections to that port: the process that had it has ended. No answer at all proves nothing."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
