"""Serves vLLM's engine on a socket. The Python of vLLM's own environment runs this file; it imports nothing of Tandem.

    python vllm_server.py MODEL_FOLDER MAX_MODEL_LEN

Prints one line {"address", "version", "flags"} when it is ready, and ends at SIGTERM. vllm_lines.py has the protocol:
tokens in, counts out, without HTTP, a tokenizer or a detokenizer, whose time would count as vLLM's.
"""

import asyncio
import itertools
import json
import os
import signal
import sys


async def main(model: str, max_model_len: int) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what its processes print must not come between the answers
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    flags = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": max_model_len,
        "max_num_seqs": 64,
    }
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, disable_log_stats=True, **flags))
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request["token_ids"]}
        try:
            outputs = engine.generate(prompt=prompt, sampling_params=params, request_id=str(next(numbers)))
            async for output in outputs:
                writer.write(f"{sum(len(each.token_ids) for each in output.outputs)}\n".encode())
        except Exception as error:  # noqa: BLE001 -- vLLM's own errors; the client reports the name
            writer.write(f"{type(error).__name__}\n".encode())
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    host, port = server.sockets[0].getsockname()
    shown = " ".join(f"{name}={value}" for name, value in flags.items())
    print(
        json.dumps({"address": f"{host}:{port}", "version": vllm.__version__, "flags": shown}), file=answers, flush=True
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with server:
        await stop.wait()
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
