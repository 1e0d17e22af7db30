"""The client library: ask a router over gRPC, read tokens as they come.

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("def fibonacci(n):", max_tokens=64):
            print(delta.text, end="")
        result = client.generate(token_ids=[1, 2, 3]).result()
        print(result.text, result.ledger.ttft_s)

`AsyncClient` is the same with `async with`, `async for` and `await`. Calls raise the errors of tandem/errors.py, and
ValueError or TypeError for what cannot be sent. Leaving a generation early (`close`, its `with`, dropping it) cancels
it on every worker.
"""

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self, TypeAlias, Unpack

import grpc

from tandem.channel import open_async_channel, open_channel
from tandem.errors import Cancelled, error_from_rpc
from tandem.options import GenerateOptions, Message, generate_request, tokenize_request
from tandem.results import Assembly, Delta, Model, Result, model_from_wire, pack_ids, unpack_ids
from tandem.v1 import inference_pb2, inference_pb2_grpc

_CALL_TIMEOUT_S = 30.0  # of everything but a generation
_GENERATION_TIMEOUT_S = 600.0
_AsyncCall: TypeAlias = "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"


class _Call(Protocol):
    """What grpc's blocking client returns for a stream of responses."""

    def __next__(self) -> inference_pb2.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Generation:
    """One running generation: iterate over its deltas, or take its `result`. One reader, once."""

    def __init__(self, call: _Call, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._assembly = Assembly(request_id)
        self._pending: deque[Delta] = deque()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._pending:
            with _told():
                response = next(self._call)
            self._pending.extend(self._assembly.add(response))
        return self._pending.popleft()

    def result(self) -> Result:
        """Reads to the end. Deltas that were read before count too."""
        for _ in self:
            pass
        return self._assembly.result()

    def close(self) -> None:
        """Cancels it if it still runs."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class Client:
    """Of one router. Safe to use from several threads; each generation has one reader."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        *,
        timeout_s: float = _GENERATION_TIMEOUT_S,
        tls_ca: str | None = None,
        secure: bool = False,
    ) -> None:
        """`address` is the router's host:port for gRPC; `timeout_s` the deadline of a generation that names none. With
        `tls_ca`, a PEM file, the router must have a certificate of one of its authorities; with `secure` alone, a
        publicly trusted one; else the connection is plaintext. Raises OSError when the file cannot be read."""
        self._channel = open_channel(address, tls_ca=tls_ca, secure=secure)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Iterable[Message] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Continues a text, token ids as they are, or a conversation: exactly one of them."""
        request = generate_request(prompt, token_ids, messages, options)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        return Generation(self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata), request.request_id)

    def tokenize(self, text: str | None = None, *, messages: Iterable[Message] | None = None) -> tuple[int, ...]:
        request = tokenize_request(text, messages)
        with _told():
            answer = self._stub.Tokenize(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        return unpack_ids(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=pack_ids(token_ids))
        with _told():
            answer = self._stub.Detokenize(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        return str(answer.text)

    def models(self) -> tuple[Model, ...]:
        request = inference_pb2.ListModelsRequest()
        with _told():
            answer = self._stub.ListModels(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        return tuple(model_from_wire(model) for model in answer.models)

    def close(self) -> None:
        """Cancels what still runs."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


class AsyncGeneration:
    """As Generation, read with `async for` or `await generation.result()`."""

    def __init__(self, call: _AsyncCall, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._responses = aiter(call)
        self._closed = False
        self._assembly = Assembly(request_id)
        self._pending: deque[Delta] = deque()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._closed:  # grpc would raise CancelledError, as if the reader's own task were cancelled
            raise Cancelled("this generation was closed", reason="cancelled")
        while not self._pending:
            with _told():
                response = await anext(self._responses)
            self._pending.extend(self._assembly.add(response))
        return self._pending.popleft()

    async def result(self) -> Result:
        """Reads to the end. Deltas that were read before count too."""
        async for _ in self:
            pass
        return self._assembly.result()

    def close(self) -> None:
        """Cancels it if it still runs."""
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """As Client, on one event loop: made and used there."""

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        *,
        timeout_s: float = _GENERATION_TIMEOUT_S,
        tls_ca: str | None = None,
        secure: bool = False,
    ) -> None:
        self._channel = open_async_channel(address, tls_ca=tls_ca, secure=secure)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = _metadata(api_key)
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Iterable[Message] | None = None,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """As Client.generate. The call starts here, before anything is awaited."""
        request = generate_request(prompt, token_ids, messages, options)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        return AsyncGeneration(call, request.request_id)

    async def tokenize(self, text: str | None = None, *, messages: Iterable[Message] | None = None) -> tuple[int, ...]:
        request = tokenize_request(text, messages)
        with _told():
            answer = await self._stub.Tokenize(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        return unpack_ids(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = inference_pb2.DetokenizeRequest(token_ids=pack_ids(token_ids))
        with _told():
            answer = await self._stub.Detokenize(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        return str(answer.text)

    async def models(self) -> tuple[Model, ...]:
        request = inference_pb2.ListModelsRequest()
        with _told():
            answer = await self._stub.ListModels(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        return tuple(model_from_wire(model) for model in answer.models)

    async def close(self) -> None:
        """Cancels what still runs."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self.close()


@contextmanager
def _told() -> Iterator[None]:
    """gRPC's errors as Tandem's."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
