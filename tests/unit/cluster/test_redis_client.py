"""The forms of `--redis`: all are parsed as operators write them, and refusals contain no password."""

import pytest

from cluster.errors import ConfigError
from cluster.registry.redis_client import RedisForm, RedisUrl, open_redis, read_redis_url
from cluster.settings.config import RouterConfig, echo
from cluster.settings.config_sources import load_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://h", RedisUrl(form=RedisForm.SERVER, hosts=(("h", 6379),))),
        (
            "rediss://me:pw@h:1/2?ssl_ca_certs=/ca",
            RedisUrl(
                form=RedisForm.SERVER,
                is_tls=True,
                credentials="me:pw",
                hosts=(("h", 1),),
                database=2,
                options="ssl_ca_certs=/ca",
            ),
        ),
        ("unix://:pw@/run/redis.sock", RedisUrl(form=RedisForm.SOCKET, credentials=":pw", path="/run/redis.sock")),
        (
            "redis+sentinel://me:pw@h1:1,[::1]:2,h3/main/4?sentinel_password=other",
            RedisUrl(
                form=RedisForm.SENTINEL,
                credentials="me:pw",
                hosts=(("h1", 1), ("::1", 2), ("h3", 26379)),
                service="main",
                database=4,
                options="sentinel_password=other",
            ),
        ),
        (
            "rediss+sentinel://h",
            RedisUrl(form=RedisForm.SENTINEL, is_tls=True, hosts=(("h", 26379),), service="mymaster"),
        ),
        ("redis+cluster://h1,h2:7/", RedisUrl(form=RedisForm.CLUSTER, hosts=(("h1", 6379), ("h2", 7)))),
    ],
)
def test_every_form_of_the_redis_setting_is_parsed_and_can_be_opened(text: str, expected: RedisUrl) -> None:
    assert read_redis_url(text) == expected
    assert open_redis(text, 1.0).place == expected.place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://user:hunter2@h",
        "redis://",
        "redis://user:hunter2@h:nine/0",
        "redis://user:hunter2@h:1/zero",
        "redis://user:hun/ter2@h:1/0",
        "redis://user:hun?ter2@h:1/0",
        "redis://user:hunter2@h1,h2",
        "redis://h/0?password=hunter2&no_such_option=1",
        "redis://h/0?health_check_interval=hunter2",
        "unix://user:hunter2@host/socket",
        "unix://",
        "redis+sentinel://user:hunter2@h1:1,/mymaster",
        "redis+sentinel://user:hunter2@h1:1/0",
        "redis+sentinel://user:hunter2@h1:1/mymaster/zero",
        "redis+sentinel://user:hunter2@h1:1/mymaster?no_such_option=1",
        "redis+cluster://user:hunter2@h1:1/3",
        "redis+cluster://user:hunter2@h1:1?no_such_option=1",
    ],
)
def test_a_malformed_redis_url_is_refused_without_printing_its_password(text: str) -> None:
    with pytest.raises(ConfigError, match="--redis") as refusal:
        open_redis(text, 1.0)
    assert "hun" not in refusal.value.message
    assert "ter2" not in refusal.value.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "redis+sentinel://me:hunter2@h1:1,h2:2/mymaster/0?sentinel_password=hunter2",
            "redis+sentinel://***@h1:1,h2:2/mymaster/0?***",
        ),
        ("rediss+cluster://:hunter2@h1,h2", "rediss+cluster://***@h1,h2"),
        ("unix://:hunter2@/run/redis.sock", "unix://***@/run/redis.sock"),
        ("redis://:hun/ter2@h:1/0", "redis://***@h:1/0"),
    ],
)
def test_no_form_shows_its_password_in_the_settings_that_are_logged(url: str, shown: str) -> None:
    assert f"redis={shown}" in echo(load_config(RouterConfig, {"model": "m", "redis": url}, {}))


def test_a_printed_redis_url_has_no_secret() -> None:
    url = read_redis_url("redis+sentinel://me:hunter2@h1:1/mymaster?sentinel_password=hunter2")
    assert "hunter2" not in repr(url) + url.place
