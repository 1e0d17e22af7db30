"""Tests that bad input to real processes gets a clear error that names the necessary change, and causes no work.

Requests go to a running cluster, over gRPC and HTTP; processes with wrong settings are started as operators start them.
"""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.message import Message
from safetensors.torch import load_file, save_file

from cluster.process import ExitStatus
from tandem.v1 import inference_pb2
from tests.polling import until
from tests.system.rigs.members.asking import ask, asked, question
from tests.system.rigs.members.planted import planted_bodies
from tests.system.rigs.processes.local_cluster import DEMO_MODEL, Launch, LocalCluster, executed, forked

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DEADLINE_S = 180.0  # three workers that load a model take most of a minute beside another file of tests
_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_WORK = ("tokens_computed", "prompts_done", "prompts_failed", "tokens_drawn", "waiting", "running")


@asynccontextmanager
async def _no_work(cluster: LocalCluster) -> AsyncIterator[None]:
    """Check that no worker queued, computed or drew anything in this time."""
    before = [await cluster.figures(role) for role in ("prefill", "decode")]
    yield
    after = [await cluster.figures(role) for role in ("prefill", "decode")]
    assert [[f[name] for name in _WORK] for f in after] == [[f[name] for name in _WORK] for f in before]


def _wrong(**changes: Any) -> inference_pb2.GenerateRequest:
    request = question((5, 6, 7))
    for name, value in changes.items():
        part = next((p for p in (request.sampling, request.stop) if name in p.DESCRIPTOR.fields_by_name), request)
        part.ClearField(name)
        if isinstance(value, Message):
            getattr(part, name).CopyFrom(value)
            getattr(part, name).SetInParent()  # also where it is empty
        elif isinstance(value, tuple):
            getattr(part, name).extend(value)
        else:
            setattr(part, name, value)
    return request


def _chat(role: Any) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role=role, content="x")])


_WRONG_REQUESTS = {
    "unknown role": (_wrong(chat=_chat(77)), _INVALID, ("role", "77", "system, user, assistant")),
    "no role": (_wrong(chat=_chat(0)), _INVALID, ("role", "system, user, assistant")),
    "empty prompt": (_wrong(token_ids=inference_pb2.TokenIds()), _INVALID, ("empty",)),
    "no prompt": (inference_pb2.GenerateRequest(), _INVALID, ("prompt",)),
    "prompt too long": (_wrong(token_ids=inference_pb2.TokenIds(ids=(5,) * 2000)), _INVALID, ("2000", "1024")),
    "prompt and answer too long": (_wrong(max_tokens=1022), _INVALID, ("1022", "1024")),
    "unknown model": (_wrong(model="gpt-9"), grpc.StatusCode.NOT_FOUND, ("gpt-9", "demo_model")),
    "token id outside": (_wrong(token_ids=inference_pb2.TokenIds(ids=(5, 999_999))), _INVALID, ("999999",)),
    "stop token outside": (_wrong(stop_token_ids=(999_999,)), _INVALID, ("999999",)),
    "temperature": (_wrong(temperature=2.5), _INVALID, ("temperature", "2.5")),
    "temperature nan": (_wrong(temperature=float("nan")), _INVALID, ("temperature", "nan")),
    "top_p": (_wrong(top_p=0.0), _INVALID, ("top_p",)),
    "min_p": (_wrong(min_p=1.5), _INVALID, ("min_p", "1.5")),
    "n": (_wrong(n=1000), _INVALID, ("n must", "1000")),
    "logprobs": (_wrong(logprobs=50), _INVALID, ("logprobs", "50")),
    "max_tokens": (_wrong(max_tokens=0), _INVALID, ("max_tokens",)),
    "min_tokens": (_wrong(min_tokens=9), _INVALID, ("min_tokens", "9")),
    "priority": (_wrong(priority=-3), _INVALID, ("priority is -3", "--scheduling-policy priority")),
    "presence_penalty": (_wrong(presence_penalty=2.5), _INVALID, ("presence_penalty", "2.5")),
    "allowed token outside": (_wrong(allowed_token_ids=(999_999,)), _INVALID, ("allowed_token_ids", "999999")),
}


@pytest.mark.parametrize("name", _WRONG_REQUESTS)
async def test_a_wrong_request_is_refused_before_any_work(cluster: LocalCluster, name: str) -> None:
    request, code, said = _WRONG_REQUESTS[name]
    async with _no_work(cluster):
        error = await _refusal(cluster, request)
    assert error.code() is code
    _assert_told(error.details() or "", *said)


async def _refusal(cluster: LocalCluster, request: inference_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asked(cluster, request) as answer:
            await answer.end()
    return caught.value


def _assert_told(text: str, *said: str) -> None:
    assert all(part in text for part in said), text
    assert "Traceback" not in text
    assert 'File "' not in text


_OVER_HTTP: dict[str, tuple[Any, int, str]] = {
    "empty prompt": ({"prompt": []}, 400, "prompt"),
    "prompt too long": ({"prompt": [5] * 2000}, 400, "2000"),
    "unknown model": ({"prompt": [5], "model": "gpt-9"}, 404, "gpt-9"),
    "token id outside": ({"prompt": [999_999]}, 400, "999999"),
    "negative token id": ({"prompt": [-1]}, 400, "-1"),
    "temperature": ({"prompt": [5], "temperature": 2.5}, 400, "temperature"),
    "top_p": ({"prompt": [5], "top_p": 7}, 400, "top_p"),
    "n": ({"prompt": [5], "n": 1000}, 400, "n"),
    "priority": ({"prompt": [5], "priority": -3}, 400, "--scheduling-policy priority"),
    "logit_bias": ({"prompt": [5], "logit_bias": {"999999": 1}}, 400, "999999"),
    "unknown field": ({"prompt": [5], "beam_width": 4}, 400, "beam_width"),
    "no JSON": (b"{", 400, "JSON"),
    "oversized": (b'{"prompt": "' + b"x" * (5 << 20) + b'"}', 413, "bytes"),
}


@pytest.mark.parametrize("name", _OVER_HTTP)
async def test_a_wrong_request_over_http_is_refused_before_any_work(cluster: LocalCluster, name: str) -> None:
    body, status, said = _OVER_HTTP[name]
    content: Any = {"content": body} if isinstance(body, bytes) else {"json": {"model": "", "max_tokens": 4} | body}
    async with _no_work(cluster), _http(cluster) as http:
        answer = await http.post("/v1/completions", **content)
    assert answer.status_code == status, answer.text
    _assert_told(answer.json()["error"]["message"], said)


def _http(cluster: LocalCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{cluster.members['router0'].ready['http']}", verify=False, timeout=30)


@pytest.mark.parametrize(("payload", "said"), [(b"\xff\xff\xff\xff", "malformed"), (b"x" * (5 << 20), "larger")])
async def test_bytes_that_are_no_message_and_too_many_bytes(cluster: LocalCluster, payload: bytes, said: str) -> None:
    async with _no_work(cluster):
        async with cluster.channel() as channel:
            method: Any = channel.unary_stream("/tandem.v1.Inference/Generate")
            call = method(payload, timeout=_DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
    assert caught.value.code() in (_INVALID, grpc.StatusCode.RESOURCE_EXHAUSTED)
    _assert_told(caught.value.details() or "", said)


async def test_a_live_requests_id_is_refused_without_any_work(cluster: LocalCluster) -> None:
    live = question((5, 6, 7), max_tokens=900, ignore_eos=True, request_id="twice")
    async with asked(cluster, live) as answer:
        await answer.until(3)
        prompts_done = (await cluster.figures("prefill"))["prompts_done"]
        error = await _refusal(cluster, live)
        assert (await cluster.figures("prefill"))["prompts_done"] == prompts_done
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    _assert_told(error.details() or "", "twice")


async def test_no_process_of_the_cluster_wrote_a_stack_trace(cluster: LocalCluster) -> None:
    for request, _, _ in _WRONG_REQUESTS.values():
        await _refusal(cluster, request)
    assert "Traceback" not in cluster.output()


async def test_prompts_and_outputs_are_in_no_log(cluster: LocalCluster) -> None:
    """The texts are sent over each API, in requests that are served and in requests that are refused."""
    planted = "xyzzy plugh 7301"
    texts = [planted]
    async with httpx.AsyncClient(base_url=f"http://{cluster.members['router0'].ready['http']}", timeout=60) as http:
        for path, body in planted_bodies(planted):
            answer = await http.post(path, json={"model": "demo_model", "temperature": 0} | body)
            assert answer.status_code < 500, answer.text
            for choice in answer.json().get("choices", []) if answer.status_code == 200 else []:
                texts.append(choice.get("text") or choice["message"]["content"])
        assert (await http.post("/v1/completions", content=f'{{"prompt": "{planted}')).status_code == 400
    texts += (await ask(cluster, _wrong(text=planted, max_tokens=24))).texts.values()
    long = [text.strip() for text in texts if len(text.strip()) >= len(planted)]
    assert len(long) > 3, "answers are long enough to be told from what a log says"
    log = cluster.output()
    assert not [text for text in long if text in log or repr(text)[1:-1] in log or json.dumps(text)[1:-1] in log]


@dataclass(frozen=True, slots=True)
class _Ended:
    status: int
    output: str  # stdout and stderr


async def _start(launch: Launch, module: str, *flags: str) -> _Ended:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    process = await launch(module, ("--log-level", "error", *flags), environment)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_DEADLINE_S):
            output = await process.stdout.read()
            return _Ended(await process.wait(), output.decode())
    except TimeoutError:
        process.kill()
        await process.wait()
        raise


_MODULES = ("prefill_worker", "decode_worker", "router")


@pytest.mark.parametrize("module", _MODULES)
async def test_wrong_settings_end_a_start_in_one_line(module: str, tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("max_model_length: 5\n")
    model = ("--model", str(DEMO_MODEL))
    starts = {
        "--no-such-flag": ("--no-such-flag", *model),
        "max_model_length": ("--config", str(file), *model),
        "--max-model-len": ("--max-model-len", "-1", *model),
        "--model": (),
    }
    # One as operators start it; the others need no second import.
    launches: tuple[Launch, ...] = (executed, forked, forked, forked)
    ended = await asyncio.gather(
        *(_start(launch, module, *flags) for launch, flags in zip(launches, starts.values(), strict=True))
    )
    for said, end in zip(starts, ended, strict=True):
        assert end.status == ExitStatus.CONFIG, end
        _assert_told(end.output, said)
        if said != "--no-such-flag":  # argparse shows the flags that there are
            assert len(end.output.splitlines()) == 1, end.output


@pytest.mark.parametrize("module", _MODULES)
async def test_missing_model_taken_port_and_unreachable_redis_end_a_start_in_one_line(
    module: str, redis_url: str, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        common = ("--cluster-key-file", str(tmp_path / "key"))
        free = ("--port", "0", *(("--grpc-port", "0") if module == "router" else ()))
        model = ("--model", str(DEMO_MODEL))
        starts = [
            (ExitStatus.CONFIG, "nowhere", (*free, "--redis", redis_url, "--model", str(tmp_path / "nowhere"))),
            (ExitStatus.REGISTRY, "127.0.0.1:1", (*free, "--redis", "redis://127.0.0.1:1/0", *model)),
            # Of a flag that is given twice, the last one counts.
            *((ExitStatus.CONFIG, port, (*free, "--redis", redis_url, *model, flag, port)) for flag in free[::2]),
        ]
        ended = await asyncio.gather(*(_start(forked, module, *common, *flags) for _, _, flags in starts))
    for end, (status, said, _) in zip(ended, starts, strict=True):
        assert end.status == status, end
        assert len(end.output.splitlines()) == 1, end.output
        _assert_told(end.output, said)


async def test_a_worker_with_the_key_of_another_cluster_ends_in_one_line(cluster: LocalCluster, tmp_path: Path) -> None:
    key = str(tmp_path / "key")  # created, as on a machine to which the cluster's file was not copied
    flags = ("--cluster-key-file", key, "--registration-ttl-s", "1", "--heartbeat-s", "0.5")
    end = await _start(forked, "decode_worker", *cluster.joining_flags(), *flags, "--model", str(DEMO_MODEL))
    assert end.status == ExitStatus.CONFIG, end
    assert len(end.output.splitlines()) == 1, end.output
    _assert_told(end.output, f"cluster key {key} is not that of the")


async def test_workers_that_do_not_match_the_cluster_are_refused_with_both_values(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """A worker with another model, block size or fine-tune of the same shape exits with status 2 and one line that
    names the difference. The other workers continue."""
    tuned = _another_fine_tune(tmp_path / "demo_model")
    starts = {
        "config": ("--model", str(_another_model(tmp_path / "other" / "demo_model")), "--load-format", "dummy"),
        "block": ("--model", str(DEMO_MODEL), "--block-size", "8"),
        "weights": ("--model", str(tuned)),
    }
    belonging = cluster.members["decode0"].ready["member"]
    ended = await asyncio.gather(
        *(_start(forked, "decode_worker", *cluster.joining_flags(), *f) for f in starts.values())
    )
    for said, end in zip(starts, ended, strict=True):
        assert end.status == ExitStatus.CONFIG, end
        assert len(end.output.splitlines()) == 1, end.output
        _assert_told(end.output, said, "cannot join")
        # One that has died stays registered until its TTL ends.
        assert any(name in end.output for name in cluster.members), end.output
    assert cluster.members["decode0"].ready["member"] == belonging
    await until(
        partial(_members, cluster),
        lambda known: set(cluster.workers()) <= known <= set(cluster.members),
        what="the refused workers have left, and no other",
    )


async def _members(cluster: LocalCluster) -> set[str]:
    return {member.member_id for member in (await cluster.status()).members}


def _another_fine_tune(folder: Path) -> Path:
    """Write the demo model with one weight changed. Every shape and name is the same."""
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if weights[name].dim() == 2)
    weights[name][0, 0] += 0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _another_model(folder: Path) -> Path:
    shutil.copytree(DEMO_MODEL, folder)
    config = folder / "config.json"
    text = config.read_text()
    changed = text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0')
    assert changed != text
    config.write_text(changed)
    return folder
