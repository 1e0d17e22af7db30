"""A worker changes its role without a restart: running work ends where it is, and routers use it for the new role."""

import asyncio
import itertools
import re
from functools import partial
from pathlib import Path

import grpc
import pytest

from cluster.errors import InvalidRequest
from cluster.messages import Role
from router import operator_commands
from router.operator_commands import MemberCommands
from tandem.enum_words import MEMBER_ROLES
from tandem.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from tests.polling import until
from tests.system.rigs.members.asking import Answer, ask, question
from tests.system.rigs.members.router_harness import (
    RouterUnderTest,
    answer_to,
    ask_and_hold,
    expected_tokens,
    router_under_test,
)
from tests.system.rigs.members.router_harness import ask as request_of
from tests.system.rigs.members.scripted_decode import ScriptedDecode
from tests.system.rigs.members.scripted_workers import connect
from tests.system.rigs.processes.live_prometheus import scrapes_of
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

_DEADLINE_S = 60.0


async def _set_role(cluster: LocalCluster, name: str, role: str) -> admin_pb2.SetRoleResponse:
    request = admin_pb2.SetRoleRequest(member_id=name, role=MEMBER_ROLES.number(role))
    async with cluster.channel() as channel:
        answer: admin_pb2.SetRoleResponse = await admin_pb2_grpc.AdminStub(channel).SetRole(
            request, timeout=_DEADLINE_S
        )
    return answer


def _prompt_heavy(number: int) -> inference_pb2.GenerateRequest:
    return question([20 + (7 * number + i) % 700 for i in range(240)], max_tokens=4, ignore_eos=True)


def _generation_heavy(number: int) -> inference_pb2.GenerateRequest:
    return question([20 + (11 * number + i) % 700 for i in range(24)], max_tokens=48, ignore_eos=True)


async def _until_role(cluster: LocalCluster, name: str, role: str) -> None:
    """Wait until the router knows the role."""

    async def roles() -> list[str]:
        return [MEMBER_ROLES.word(m.role) for m in (await cluster.status()).members if m.member_id == name]

    await until(roles, lambda seen: role in seen, what=f"the router knows that {name} has the role {role}")


async def _until_decoded_on(cluster: LocalCluster, names: tuple[str, ...]) -> None:
    """Wait until each of these workers has decoded a sequence to its end."""
    for name in names:
        inspect = partial(cluster.inspect, name)
        await until(inspect, lambda seen: seen.figures["sequences_done"], what=f"{name} has decoded a sequence")


async def test_two_of_four_workers_change_their_role_under_load_without_losing_a_request(
    redis_url: str, tmp_path: Path
) -> None:
    flags = ("--dtype", "float32", "--kv-transports", "shm", "--max-prefill-tokens", "64", "--num-blocks", "512")
    cluster = LocalCluster(redis_url, tmp_path, flags=flags)
    flipped = ("prefill1", "prefill2")
    try:
        await cluster.start(prefill=3, decode=1)
        before = {member.member_id: member.incarnation for member in (await cluster.status()).members}
        asked = [_prompt_heavy(number) for number in range(8)]
        load = [asyncio.create_task(ask(cluster, each)) for each in asked]
        for name in flipped:
            answer = await _set_role(cluster, name, "decode")
            assert MEMBER_ROLES.word(answer.former_role) == "prefill"
        later: list[tuple[inference_pb2.GenerateRequest, Answer]] = []
        numbers = itertools.count()
        decoded = asyncio.create_task(_until_decoded_on(cluster, flipped))
        while not decoded.done():
            batch = [_generation_heavy(next(numbers)) for _ in range(4)]
            later += zip(batch, await asyncio.gather(*(ask(cluster, each) for each in batch)), strict=True)
        await decoded

        answers = [*zip(asked, await asyncio.gather(*load), strict=True), *later[:8]]
        for each, given in answers:
            assert (await ask(cluster, each)).choices == given.choices
        after = (await cluster.status()).members
        assert {member.member_id: member.incarnation for member in after} == before, "a process restarted"
        roles = {member.member_id: MEMBER_ROLES.word(member.role) for member in after}
        assert roles == {"router0": "router", "prefill0": "prefill", **dict.fromkeys((*flipped, "decode0"), "decode")}
        described = {
            name: re.findall(r'^tandem_build_info\{.*role="(\w+)"', text, re.MULTILINE)
            for name, text in (await scrapes_of(cluster)).items()
        }
        assert described == {name: [role] for name, role in roles.items()}
        await cluster.until_free()
    finally:
        codes = await cluster.stop()
    assert set(codes.values()) == {0}, cluster.output()[-4000:]


async def test_a_role_is_refused_to_members_that_cannot_have_it(cluster: LocalCluster) -> None:
    for name, role, code, words in (
        ("absent", "decode", grpc.StatusCode.NOT_FOUND, "no member 'absent'"),
        ("router0", "decode", grpc.StatusCode.INVALID_ARGUMENT, "is a router"),
        ("decode0", "router", grpc.StatusCode.INVALID_ARGUMENT, "one of prefill, decode, both"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refusal:
            await _set_role(cluster, name, role)
        assert refusal.value.code() is code


async def test_the_last_worker_that_decodes_keeps_its_role(cluster: LocalCluster) -> None:
    await _set_role(cluster, "decode0", "prefill")
    try:
        await _until_role(cluster, "decode0", "prefill")
        with pytest.raises(grpc.aio.AioRpcError, match="decode1 is the last worker that decodes"):
            await _set_role(cluster, "decode1", "prefill")
    finally:
        await _set_role(cluster, "decode0", "decode")
        await _until_role(cluster, "decode0", "decode")
    await cluster.until_free()


async def test_a_worker_that_has_died_does_not_count_as_one_that_decodes() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        dead, last = await router.add_decode("d0"), await router.add_decode("d1")
        await router.connected()
        await dead.die()
        await router.until_gone(dead)  # its registration remains
        with pytest.raises(InvalidRequest, match="d1 is the last worker that decodes"):
            await _commands(router).set_role(last.id.id, Role.PREFILL)


async def test_two_operators_do_not_take_the_role_from_the_last_two_workers_that_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator_commands, "_ASK_S", _DEADLINE_S)
    async with router_under_test() as router:
        decodes = [await router.add_decode("d0"), await router.add_decode("d1")]
        await router.connected()
        commands = _commands(router)
        changing = [asyncio.ensure_future(commands.set_role(worker.id.id, Role.PREFILL)) for worker in decodes]
        await until(partial(_roles, decodes), lambda roles: Role.PREFILL in roles, what="one of them has its new role")
        router.register()
        outcomes = await asyncio.gather(*changing, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["InvalidRequest", "RoleChange"]
        assert sorted(await _roles(decodes)) == [Role.DECODE, Role.PREFILL]


def _commands(router: RouterUnderTest) -> MemberCommands:
    return MemberCommands(
        router=router.member.id,
        fleet=router.fleet,
        connect=connect,
        stop=asyncio.Event(),
        drained=asyncio.get_running_loop().create_future(),
    )


async def _roles(workers: list[ScriptedDecode]) -> list[Role]:
    return [worker.role for worker in workers]


async def test_a_sequence_ends_where_it_runs_when_its_worker_gets_another_role() -> None:
    async with router_under_test() as router:
        await router.add_prefill("p0")
        flipped = await router.add_decode("d0")
        await router.connected()
        flipped.pause_at = 3
        request = request_of(max_tokens=6)
        held = await ask_and_hold(router, request, flipped)
        other = await router.add_decode("d1")
        await router.connected()
        flipped.role = Role.PREFILL
        router.register()
        async with asyncio.timeout(_DEADLINE_S):
            while [load.member for load in router.fleet.decode_loads()] != [other.id]:
                await router.fleet.changed()
        assert {load.member.id for load in router.fleet.prefill_loads()} == {"p0", "d0"}
        flipped.resumed.set()
        answer = await held
        assert answer.token_ids[0] == expected_tokens(router, request)
        assert answer.summary.ledger.members[-1] == str(flipped.id)


async def test_a_worker_of_both_roles_alone_is_preferred_to_a_hand_off_between_two() -> None:
    async with router_under_test(placement="least-loaded") as router:
        workers = [await router.add_decode(name) for name in ("w0", "w1")]
        for worker in workers:
            worker.role = Role.BOTH
        router.register()
        await router.connected()
        for _ in range(4):
            await answer_to(router, request_of())
        assert [len(worker.jobs) for worker in workers] == [2, 2]
        assert all(job.signed_ticket is None for worker in workers for job in worker.jobs)
