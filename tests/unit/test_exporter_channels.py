"""Channels to exporters: shared while used, kept for the next hand-off, and not for ever."""

from cluster.serving.serving import open_channel
from kvtransfer.importer import exporter_channels
from kvtransfer.importer.exporter_channels import ExporterChannels


async def test_hand_offs_with_one_exporter_share_its_channel() -> None:
    channels = ExporterChannels(open_channel)
    async with channels.use("127.0.0.1:1") as first, channels.use("127.0.0.1:1") as second:
        assert first is second
    async with channels.use("127.0.0.1:1") as later:
        assert later is first
    await channels.close()


async def test_only_so_many_unused_channels_are_kept() -> None:
    channels = ExporterChannels(open_channel)
    async with channels.use("127.0.0.1:1"):
        for port in range(2, exporter_channels._MAX_IDLE + 10):
            async with channels.use(f"127.0.0.1:{port}"):
                pass
        assert len(channels) == exporter_channels._MAX_IDLE + 1  # the one in use is not counted among them
    await channels.close()
    assert len(channels) == 0
