"""Channels to exporters are shared while in use, and a bounded number is kept for later hand-offs."""

from cluster.serving.serving import open_channel
from kvtransfer.importer import calls
from kvtransfer.importer.calls import GrpcChannelPool


async def test_hand_offs_with_one_exporter_share_its_channel() -> None:
    channels = GrpcChannelPool(open_channel)
    async with channels.use("127.0.0.1:1") as first, channels.use("127.0.0.1:1") as second:
        assert first is second
    async with channels.use("127.0.0.1:1") as later:
        assert later is first
    await channels.close()


async def test_the_number_of_kept_unused_channels_is_bounded() -> None:
    channels = GrpcChannelPool(open_channel)
    async with channels.use("127.0.0.1:1"):
        for port in range(2, calls._MAX_IDLE + 10):
            async with channels.use(f"127.0.0.1:{port}"):
                pass
        assert len(channels) == calls._MAX_IDLE + 1  # the one in use is not counted among them
    await channels.close()
    assert len(channels) == 0
