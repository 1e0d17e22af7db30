"""Tests that a link check measures a pair over real transports, admits only members, and loses or changes no block."""

import asyncio
from dataclasses import replace

import pytest

from cluster.auth.keys import ClusterKeys
from cluster.errors import HandOffFailed, HandOffReason, InvalidRequest, Overloaded, TandemError, Unavailable
from cluster.protocol.wire import epoch_from_wire, fingerprint_to_wire
from kvtransfer import link_check as probe_module
from kvtransfer.transports.available import Available
from kvtransfer.transports.base import TransportError
from tandem.internal.v1 import kv_pb2, worker_pb2
from tests.contract.link_check.link_check_rig import (
    DEADLINE_S,
    NUM_BLOCKS,
    STRANGER,
    FarAway,
    StuckTransport,
    probe_rig,
)
from tests.contract.rigs.handoff_parts import EXPORTER, IMPORTER, LAYOUT
from tests.loopback import Fault


async def test_every_shared_transport_is_measured_best_first() -> None:
    async with probe_rig() as rig:
        paths = await rig.measure()
        assert list(paths) == ["shm", "tcp", "cuda_ipc", "nccl", "nixl"]
        for name in ("shm", "tcp"):
            assert paths[name].reason == "" and paths[name].bytes_per_s > 0 and paths[name].latency_s >= 0
        figures = {figure.transport: figure for figure in rig.links.speeds()}
        assert set(figures) == {"shm", "tcp"}, "hand-offs and placement learn from it"
        rig.check()


async def test_blocks_of_other_sequences_are_not_changed() -> None:
    async with probe_rig() as rig:
        others = rig.blocks.pool.reserve(NUM_BLOCKS // 2)
        assert others is not None
        before = rig.target.raw[list(others)].clone(), rig.source.raw.clone()
        paths = await rig.measure()
        assert paths["tcp"].bytes_per_s > 0
        assert bool((rig.target.raw[list(others)] == before[0]).all())
        assert bool((rig.source.raw == before[1]).all())
        read = sum(bool((rig.target.raw[block] == rig.source.raw[block]).all()) for block in range(NUM_BLOCKS))
        assert read <= NUM_BLOCKS // 2 // 4, "a quarter of what is free, at most"
        rig.blocks.pool.drop_references(list(others))
        rig.check()


async def test_a_missing_transport_is_reported_with_reason_and_side() -> None:
    here = {"nccl": "cupy is not installed", "nixl": "no RDMA device here"}
    there = {"nccl": "cupy is not installed", "cuda_ipc": "no GPU here"}
    async with probe_rig(missing_here=here, missing_there=there) as rig:
        paths = await rig.measure()
        assert paths["nccl"].reason == "cupy is not installed"
        assert paths["cuda_ipc"].reason == "on p0: no GPU here"
        assert paths["nixl"].reason == "on d0: no RDMA device here; on p0: not part of this version"


async def test_a_transport_that_does_not_connect_the_workers_is_reported() -> None:
    async with probe_rig() as rig:
        elsewhere = FarAway(rig.means.transports.importers[0])
        rig.means = replace(rig.means, transports=Available((), (elsewhere, *rig.means.transports.importers[1:])))
        paths = await rig.measure()
        assert "does not connect the two" in paths["shm"].reason
        assert paths["tcp"].reason == ""


async def test_a_transport_that_fails_in_a_link_check_is_reported_and_the_next_is_measured() -> None:
    async with probe_rig("loopback", "tcp", faults={0: Fault.KILL}) as rig:
        paths = await rig.measure()
        assert paths["loopback"].reason == "the exporter is dead"
        assert paths["tcp"].bytes_per_s > 0
        assert not rig.links.is_usable(EXPORTER, "loopback", rig.means.clock.now_s())
        rig.check()


async def test_a_read_that_never_ends_fails_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_READ_S", 0.05)
    async with probe_rig("loopback", "tcp", faults={0: Fault.DROP}) as rig, asyncio.TaskGroup() as tasks:
        measuring = tasks.create_task(rig.measure())
        await rig.schedule.holding.wait()
        monkeypatch.setattr(probe_module, "_READ_S", DEADLINE_S)  # of the reads that must succeed
        paths = await measuring
        assert "did not end" in paths["loopback"].reason
        assert paths["tcp"].bytes_per_s > 0
        rig.check()


async def test_blocks_stay_in_quarantine_until_the_link_checks_read_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_module, "_READ_S", 0.05)
    monkeypatch.setattr(probe_module, "_QUIET_S", 0.05)
    stuck = StuckTransport()
    async with probe_rig("tcp", "shm", importer_sides=[stuck]) as rig:
        rig.means = replace(rig.means, transports=Available((), (stuck, *rig.means.transports.importers[1:])))
        paths = await rig.measure(max_blocks=4)
        assert "did not end" in paths["tcp"].reason
        assert "may still write" in paths["shm"].reason
        assert rig.blocks.pool.counts()["quarantined"] == 4
        stuck.let_go.set()
        async with asyncio.timeout(DEADLINE_S), rig.blocks.changed:
            await rig.blocks.changed.wait_for(lambda: not rig.blocks.pool.counts()["quarantined"])
        rig.check()


async def test_a_link_check_without_free_blocks_measures_nothing() -> None:
    async with probe_rig() as rig:
        taken = rig.blocks.pool.reserve(NUM_BLOCKS - 3)
        assert taken is not None
        with pytest.raises(Overloaded, match="3 blocks are free here"):
            await rig.measure()
        rig.blocks.pool.drop_references(list(taken))
        rig.check()


async def test_a_link_check_whose_free_blocks_were_reserved_by_others_ends_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_module, "_RESERVE_S", 0.05)

    async def stale() -> int:
        return NUM_BLOCKS

    async with probe_rig() as rig:
        taken = rig.blocks.pool.reserve(NUM_BLOCKS - 3)
        assert taken is not None
        request = worker_pb2.CheckLinkRequest(exporter=str(EXPORTER), address=rig.address)
        with pytest.raises(Overloaded, match="fewer than 16 blocks became free"):
            await rig.probe(stale).measure(request)
        rig.blocks.pool.drop_references(list(taken))
        rig.check()


async def test_a_link_check_without_a_valid_signature_is_refused() -> None:
    async with probe_rig("tcp") as rig:
        for forged in (
            rig.request(key=ClusterKeys(b"x" * 32)),
            rig.request(address="127.0.0.1:9"),  # signed by a member for a link check of another exporter
            kv_pb2.OpenLinkCheckRequest(importer=str(STRANGER), transports=["tcp"], layout=fingerprint_to_wire(LAYOUT)),
        ):
            with pytest.raises(HandOffFailed) as refused:
                await rig.start_check(forged)
            assert refused.value.handoff_reason is HandOffReason.BAD_SIGNATURE
        stolen = rig.request()
        stolen.importer = str(STRANGER)
        with pytest.raises(HandOffFailed, match="bad_signature"):
            await rig.start_check(stolen)
        assert (await rig.start_check(rig.request())).paths, "and its member is let in"


async def test_another_layout_is_refused_with_both_values() -> None:
    async with probe_rig() as rig:
        rig.means = replace(rig.means, layout=replace(LAYOUT, dtype="bfloat16"))
        with pytest.raises(HandOffFailed, match="layout_mismatch: dtype: float32 here, bfloat16 there"):
            await rig.measure()
        rig.check()


async def test_one_link_check_is_open_at_a_time_and_ends_with_its_importer() -> None:
    async with probe_rig("tcp") as rig:
        opened = await rig.start_check(rig.request())
        with pytest.raises(Overloaded, match="d0@b2 is measuring its link to p0@a1"):
            await rig.start_check(rig.request(STRANGER))
        assert (await rig.start_check(rig.request())).epoch != opened.epoch, "its own link check opens again"
        done = rig.request()
        del done.transports[:]
        assert not (await rig.start_check(done)).paths
        assert (await rig.start_check(rig.request(STRANGER))).paths


async def test_a_revoked_epochs_open_channel_reads_nothing_more() -> None:
    async with probe_rig("tcp") as rig:
        opened = await rig.start_check(rig.request())
        endpoint = next(path.endpoint for path in opened.paths if path.transport == "tcp")
        tcp = rig.means.transports.importers[0]
        channel = await tcp.open_channel(epoch_from_wire(opened.epoch), endpoint)
        await channel.read([0], [0])
        rig.opening.close()
        with pytest.raises(TransportError):
            await channel.read([1], [1])
        await channel.destroy()


async def test_a_link_check_ends_at_its_time_limit() -> None:
    async with probe_rig("tcp", open_s=0.05) as rig:
        await rig.start_check(rig.request())
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await rig.start_check(rig.request(STRANGER))
                except Overloaded:
                    continue
                break


async def test_one_link_check_runs_at_a_time() -> None:
    async with probe_rig() as rig:
        started, go_on = asyncio.Event(), asyncio.Event()

        async def slow() -> int:
            started.set()
            await go_on.wait()
            return NUM_BLOCKS

        probe = rig.probe(slow)
        request = worker_pb2.CheckLinkRequest(exporter=str(EXPORTER), address=rig.address)
        first = asyncio.create_task(probe.measure(request))
        await started.wait()
        with pytest.raises(Overloaded, match="measuring another link"):
            await probe.measure(request)
        go_on.set()
        async with asyncio.timeout(DEADLINE_S):
            assert (await first).paths
        rig.check()


@pytest.mark.parametrize(
    ("exporter", "address", "kind"),
    [("p0", "", InvalidRequest), (str(IMPORTER), "", InvalidRequest), (str(EXPORTER), "127.0.0.1:1", Unavailable)],
)
async def test_an_unreachable_exporter_is_named(exporter: str, address: str, kind: type[TandemError]) -> None:
    async with probe_rig() as rig:
        request = worker_pb2.CheckLinkRequest(exporter=exporter, address=address or rig.address)
        with pytest.raises(kind):
            await rig.probe().measure(request)
        rig.check()


async def test_a_cancelled_link_check_leaves_nothing_behind() -> None:
    async with probe_rig("loopback", faults={0: Fault.STOP}) as rig:
        request = worker_pb2.CheckLinkRequest(exporter=str(EXPORTER), address=rig.address)
        measuring = asyncio.create_task(rig.probe().measure(request))
        async with asyncio.timeout(DEADLINE_S):
            await rig.schedule.holding.wait()
        assert rig.blocks.granted
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring
        rig.check()
        assert (await rig.start_check(rig.request(STRANGER))).paths, "the exporter has heard it"
