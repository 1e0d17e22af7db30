"""The life of a request: which worker is called when, what the client receives, and that nothing is left afterwards."""

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import pytest

from cluster.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    SlowClient,
    UnknownModel,
)
from router.requests import ChatMessage, ChatPrompt, GenerateRequest, StopConditions, TextPrompt, TokenPrompt
from tests.polling import until
from tests.system.rigs.members.router_harness import (
    Answer,
    RouterUnderTest,
    answer_to,
    ask,
    expected_tokens,
    pass_time,
    router_under_test,
)
from tests.system.rigs.members.scripted_workers import Gate


async def test_a_request_goes_through_both_workers_and_gives_every_token_once() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        request = ask(max_tokens=20)
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.finish_reasons[0] == "length"
        assert answer.text[0] == router.tokenization.decode(answer.token_ids[0])
        assert len(prefill.jobs) == len(decode.jobs) == 1
        assert prefill.jobs[0].importer == decode.id
        ledger = answer.summary.ledger
        assert ledger.members == (str(prefill.id), str(decode.id))
        assert (ledger.transport, ledger.kv_bytes, ledger.reasons) == ("tcp", 400, ())
        assert answer.summary.usage.prompt_tokens == 4
        assert answer.summary.usage.completion_tokens == 20


async def test_a_client_may_ask_for_several_tokens_at_a_time() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        request = replace(ask(max_tokens=20), stream_interval=7)
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        lengths = [len(delta.token_ids) for output in answer.outputs for delta in output.deltas]
        assert all(length >= 7 for length in lengths[1:-1]), lengths


async def test_a_request_that_has_ended_leaves_nothing_to_the_garbage_collector() -> None:
    """A cycle of references would keep all objects of a request until a collection, which stops every stream."""
    async with router_under_test() as router:
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await answer_to(router, ask())
            gc.collect()
            kinds = {type(each) for each in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
        assert not [kind for kind in kinds if kind.__module__.startswith("router.")]


async def test_the_first_token_arrives_while_the_transfer_is_held() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.transfer.close()
        answer = Answer()
        async with aclosing(router.pipeline.generate(ask())) as outputs:
            async with asyncio.timeout(10):
                while not answer.token_ids:
                    answer.take(await anext(outputs))
                await decode.transfer.reached.wait()
            assert len(answer.token_ids[0]) == 1
            decode.transfer.open()
            async for output in outputs:
                answer.take(output)
        assert len(answer.token_ids[0]) == 8
        phases = {phase.name: phase.duration_s for phase in answer.summary.ledger.phases}
        assert phases["transfer"] > 0


async def test_both_legs_run_at_once() -> None:
    """The decode worker has its ticket while the prefill worker still computes."""
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        prefill.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, ask()))
        async with asyncio.timeout(10):
            await decode.started.wait()
        assert decode.jobs[0].signed_ticket is not None
        prefill.before_first_tokens.open()
        assert len((await task).token_ids[0]) == 8


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_one_token_needs_no_decode_leg(max_tokens: int) -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        answer = await answer_to(router, ask(max_tokens=max_tokens))
        assert len(answer.token_ids[0]) == max_tokens
        assert len(decode.jobs) == max_tokens - 1
        assert (prefill.jobs[0].importer is None) == (max_tokens == 1)


async def test_a_first_token_that_ends_the_request_keeps_no_decode_leg() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        request = ask()
        first = expected_tokens(router, request)[0]
        decode.transfer.close()
        answer = await answer_to(router, ask(stop_token_ids=(first,)))
        assert answer.token_ids[0] == [first]
        assert (answer.finish_reasons[0], answer.stop_causes[0], answer.text[0]) == ("stop", first, "")
        async with asyncio.timeout(10):
            await decode.cancelled.wait()
        decode.transfer.open()


async def test_choices_share_one_prefill_and_each_has_its_own_seed() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        request = ask(n=4)
        answer = await answer_to(router, request)
        assert [answer.token_ids[i] for i in range(4)] == [expected_tokens(router, request, i) for i in range(4)]
        assert len(prefill.jobs) == len(decode.jobs) == 1
        assert len(set(prefill.jobs[0].seeds)) == 4
        assert prefill.jobs[0].seeds == tuple(sequence.seed for sequence in decode.jobs[0].sequences)


async def test_a_stop_string_ends_the_text_and_the_sequence_at_the_worker() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        tokens = expected_tokens(router, ask(max_tokens=40))
        text = router.tokenization.decode(tokens)
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        decode.pause_at = 39
        answer = await answer_to(router, ask(max_tokens=40, stop=(stop,)))
        assert answer.text[0] == text[: text.index(stop)]
        assert (answer.finish_reasons[0], answer.stop_causes[0]) == ("stop", stop)
        async with asyncio.timeout(10):
            await decode.cancelled.wait()


async def test_logprobs_come_with_every_token() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        answer = await answer_to(router, ask(logprobs=2))
        logprobs = [item for output in answer.outputs for delta in output.deltas for item in delta.logprobs]
        assert [item.token_id for item in logprobs] == answer.token_ids[0]
        assert all(len(item.top) == 2 for item in logprobs)


async def test_a_colocated_cluster_prefills_on_decode_and_counts_no_fallback() -> None:
    async with router_under_test() as router:
        decode = await router.add_decode("d0")
        await router.connected()
        request = ask()
        answer = await answer_to(router, request)
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert decode.jobs[0].signed_ticket is None
        assert answer.summary.ledger.reasons == ()
        assert answer.summary.ledger.transport == "local"
        assert router.telemetry.value("tandem_local_prefills_total", reason="colocated") == 1


async def test_a_request_waits_for_a_worker() -> None:
    async with router_under_test() as router:
        task = asyncio.create_task(answer_to(router, ask()))
        await router.add_decode("d0")
        assert len((await task).token_ids[0]) == 8


@pytest.mark.parametrize("n", [1, 3])
async def test_the_ledger_sums_to_the_wall_time(n: int) -> None:
    async with router_under_test() as router:
        prefill = await router.add_prefill("p0")
        await router.add_decode("d0")
        await router.connected()
        prefill.prefill_s = 1000.0  # a worker's clock is not the router's: its durations are cut to what can be
        ledger = (await answer_to(router, ask(n=n, max_tokens=30))).summary.ledger
        assert sum(phase.duration_s for phase in ledger.phases) == pytest.approx(ledger.wall_s, rel=0.001)
        assert 0 < ledger.ttft_s <= ledger.wall_s
        assert [phase.name for phase in ledger.phases][:4] == ["tokenize", "admit", "prefill_queue", "prefill"]


async def test_a_client_that_leaves_frees_both_workers() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        prefill.before_first_tokens.close()
        task = asyncio.create_task(answer_to(router, ask()))
        async with asyncio.timeout(10):
            await decode.started.wait()
            task.cancel()
            await prefill.cancelled.wait()
            await decode.cancelled.wait()
        assert decode.cancelled_handles == {sequence.handle for sequence in decode.jobs[0].sequences}


async def test_closing_a_stream_in_its_middle_cancels_its_sequences() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 5
        async with aclosing(router.pipeline.generate(ask(max_tokens=100))) as outputs:
            await anext(outputs)
        async with asyncio.timeout(10):
            await decode.cancelled.wait()
        assert router.live_requests.num_served == 0


async def test_a_deadline_names_its_phase_and_cancels_both_legs() -> None:
    async with router_under_test() as router:
        prefill, decode = await router.add_prefill("p0"), await router.add_decode("d0")
        await router.connected()
        decode.transfer.close()
        await _late_at(router, decode.transfer, "transfer")
        async with asyncio.timeout(10):
            await decode.cancelled.wait()
        prefill.before_first_tokens.close()
        await _late_at(router, prefill.before_first_tokens, "prefill_queue")
        async with asyncio.timeout(10):
            await prefill.cancelled.wait()
        decode.transfer.open()


async def _phase(router: RouterUnderTest) -> str:
    (live,) = router.live_requests
    return live.account.phase


async def _late_at(router: RouterUnderTest, gate: Gate, phase: str) -> None:
    """Let the deadline of a request pass while a worker holds it at a gate; the error must name the phase."""
    answering = asyncio.create_task(answer_to(router, ask(timeout_s=15.0)))
    async with asyncio.timeout(10):
        await gate.reached.wait()
    await until(partial(_phase, router), lambda seen: seen == phase, what="what the other worker sent")
    pass_time(15.0)
    with pytest.raises(DeadlineExceeded, match=f"in phase {phase}"):
        await answering


async def test_a_request_without_a_worker_until_its_deadline_names_the_reason() -> None:
    async with router_under_test() as router:
        with pytest.raises(DeadlineExceeded, match="in phase admit"):
            await answer_to(router, ask(timeout_s=0.1))


async def test_a_client_that_does_not_read_is_ended_beyond_the_bound_and_others_continue() -> None:
    async with router_under_test(max_buffered_tokens=300) as router:
        await router.add_decode("d0")
        await router.connected()
        async with aclosing(router.pipeline.generate(ask(max_tokens=900))) as slow:
            await anext(slow)
            request = ask(max_tokens=900, prompt=(1, 2))
            answer = await answer_to(router, request)
            assert answer.token_ids[0] == expected_tokens(router, request)
            assert router.live_requests.num_served == 0, "a request must end although its client reads nothing"
            with pytest.raises(SlowClient, match="read faster"):
                async for _ in slow:
                    pass
        assert router.telemetry.value("tandem_requests_total", outcome="slow_client") == 1


async def test_a_live_id_is_refused_and_free_again_afterwards() -> None:
    async with router_under_test() as router:
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 2
        first = asyncio.create_task(answer_to(router, ask(request_id="mine")))
        async with asyncio.timeout(10):
            await decode.paused.wait()
        with pytest.raises(DuplicateRequest, match="mine"):
            await answer_to(router, ask(request_id="mine"))
        decode.resumed.set()
        assert len((await first).token_ids[0]) == 8
        assert len((await answer_to(router, ask(request_id="mine"))).token_ids[0]) == 8


async def test_a_refused_request_gets_a_retry_time_before_any_work() -> None:
    async with router_under_test(max_live_requests=1) as router:
        decode = await router.add_decode("d0")
        await router.connected()
        decode.pause_at = 2
        first = asyncio.create_task(answer_to(router, ask()))
        async with asyncio.timeout(10):
            await decode.paused.wait()
        with pytest.raises(Overloaded) as refusal:
            await answer_to(router, ask())
        assert refusal.value.retry_after_s is not None and refusal.value.retry_after_s > 0
        assert len(decode.jobs) == 1
        decode.resumed.set()
        await first


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (ask(prompt=()), InvalidRequest, "empty"),
        (ask(prompt=tuple(range(1, 1021)), max_tokens=50), ContextLengthExceeded, "1020.*50.*1024"),
        (ask(prompt=(1,) * 1024, max_tokens=1), ContextLengthExceeded, "1024.*1023"),
        (ask(prompt=(1024,)), InvalidRequest, "1024 is outside the vocabulary: 0 to 1023"),
        (ask(n=0), InvalidRequest, "n must be"),
        (GenerateRequest(TokenPrompt((1,)), model="gpt-5"), UnknownModel, "gpt-5.*demo_model"),
        (ask(stop=("",)), InvalidRequest, "stop string"),
        (ask(stop_token_ids=(5000,)), InvalidRequest, "5000"),
        (GenerateRequest(ChatPrompt(())), InvalidRequest, "messages"),
        (GenerateRequest(TextPrompt("")), InvalidRequest, "empty"),
        (GenerateRequest(TokenPrompt((1,)), stop=StopConditions(2, min_tokens=3)), InvalidRequest, "min_tokens"),
    ],
)
async def test_bad_input_is_refused_with_the_necessary_change_and_reaches_no_worker(
    request_: GenerateRequest, error: type[InvalidRequest], message: str
) -> None:
    async with router_under_test() as router:
        decode = await router.add_decode("d0")
        await router.connected()
        with pytest.raises(error, match=message):
            await answer_to(router, request_)
        assert decode.jobs == []
        assert (
            router.telemetry.value("tandem_requests_refused_total", reason=error.reason, service_class="interactive")
            == 1
        )


async def test_text_and_chat_prompts_are_tokenized_by_the_model() -> None:
    async with router_under_test() as router:
        decode = await router.add_decode("d0")
        await router.connected()
        messages = (ChatMessage("user", "def f():"),)
        short, long = "def f():", "import something\n" * 122
        for prompt in (TextPrompt(short), TextPrompt(long), ChatPrompt(messages)):
            await answer_to(router, GenerateRequest(prompt, stop=StopConditions(max_tokens=2)))
        encode, encode_chat = router.tokenization.encode, router.tokenization.encode_chat
        assert [job.prompt_token_ids for job in decode.jobs] == [encode(short), encode(long), encode_chat(messages, 0)]
