"""Settings: one name serves as flag, variable and file key; a wrong setting is refused before the process starts."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.connection import find_address, find_http_address
from cli.local.layout import Layout, Pools, Ports
from cluster.errors import ConfigError
from cluster.settings.config import RouterConfig, WorkerConfig, echo
from cluster.settings.config_sources import load_config, parse_arguments
from cluster.settings.worker_settings import flag_of, parse_bytes


def _worker(arguments: Sequence[str], environment: dict[str, str] | None = None) -> WorkerConfig:
    flags = dict(
        zip([name.removeprefix("--").replace("-", "_") for name in arguments[::2]], arguments[1::2], strict=True)
    )
    return load_config(WorkerConfig, flags, environment or {})


def test_flag_wins_over_variable_wins_over_file_wins_over_default(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("model: m\nblock_size: 8\nmax_num_seqs: 3\nmax_queue: 5\n")
    environment = {"TANDEM_CONFIG": str(file), "TANDEM_BLOCK_SIZE": "32", "TANDEM_MAX_NUM_SEQS": "4"}
    config = load_config(WorkerConfig, {"block_size": 64}, environment)
    assert (config.block_size, config.max_num_seqs, config.max_queue, config.port) == (64, 4, 5, 0)


@pytest.mark.parametrize("config_type", [WorkerConfig, RouterConfig])
def test_every_setting_is_a_flag_a_variable_and_a_key(
    config_type: type[WorkerConfig] | type[RouterConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, lines = [], []
    for item in dataclasses.fields(config_type):
        value = {"model": "m", "kv_transports": "tcp", "kv_cache_memory": "1MiB"}.get(item.name, item.default)
        arguments += ["--" + item.name.replace("_", "-"), str(value)]
        lines.append(f"{item.name}: {value!r}\n")
        monkeypatch.setenv("TANDEM_" + item.name.upper(), str(value))
    (tmp_path / "tandem.yaml").write_text("".join(lines))
    by_variable = parse_arguments(config_type, "it", [])
    for item in dataclasses.fields(config_type):
        monkeypatch.delenv("TANDEM_" + item.name.upper())
    by_flag = parse_arguments(config_type, "it", arguments)
    by_file = parse_arguments(config_type, "it", ["--config", str(tmp_path / "tandem.yaml")])
    assert by_flag == by_variable == by_file


def test_one_file_serves_routers_and_workers(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("model: m\ngrpc_port: 7\nblock_size: 8\n")
    assert load_config(WorkerConfig, {"config": file}, {}).block_size == 8
    assert load_config(RouterConfig, {"config": file}, {}).grpc_port == 7


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("model: m\nblok_size: 8\n")
    with pytest.raises(ConfigError, match="unknown key 'blok_size'; did you mean block_size"):
        load_config(WorkerConfig, {"config": file}, {})


def test_a_model_in_the_home_folder_is_found_where_no_shell_has_replaced_the_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--model=~/m` and a file of settings; routers and `tandem up` found such a folder, and workers did not."""
    monkeypatch.setenv("HOME", str(tmp_path))
    drafting = {"model": "~/m", "speculation": "draft", "draft_model": "~/d"}
    config = load_config(WorkerConfig, drafting, {})
    assert (config.model, config.draft_model) == (f"{tmp_path}/m", f"{tmp_path}/d")
    assert load_config(RouterConfig, {"model": "acme/m~1"}, {}).model == "acme/m~1"


@pytest.mark.parametrize("config_type", [WorkerConfig, RouterConfig])
def test_no_number_is_accepted_that_overflows_a_library(config_type: type[WorkerConfig] | type[RouterConfig]) -> None:
    """Redis refuses such a registration for ever, and gRPC raises OverflowError for such a size."""
    numbers = [item for item in dataclasses.fields(config_type) if isinstance(item.default, int | float)]
    assert len(numbers) > 10
    for item in numbers:
        for value in (1 << 31, *((math.inf, math.nan) if isinstance(item.default, float) else ())):
            with pytest.raises(ConfigError, match=flag_of(item.name)):
                load_config(config_type, {"model": "m", item.name: value}, {})


def test_the_variables_of_commands_are_no_unknown_settings() -> None:
    """A shell in which commands find a cluster starts another one."""
    environment = {"TANDEM_ADDRESS": "h:1", "TANDEM_HTTP_ADDRESS": "h:2"}
    assert _worker(["--model", "m"], environment).model == "m"
    assert (find_address(None, environment), find_http_address(None, environment)) == ("h:1", "h:2")


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown variable TANDEM_BLOK_SIZE.*did you mean block_size"):
        _worker(["--model", "m"], {"TANDEM_BLOK_SIZE": "8"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blok-size", "8"], "unknown flag --blok-size; did you mean --block-size?"),
        (["--blok-size=8"], "unknown flag --blok-size; did you mean --block-size?"),
        (["--zzz"], "unknown flag --zzz; python -m prefill_worker --help lists the flags"),
        (["eight"], "unexpected argument 'eight'"),
        (["--block-size", "x"], "--block-size must be a whole number, not 'x'; python -m prefill_worker --help lists"),
        (["--lease-s", "long"], "--lease-s must be a number, not 'long'; "),
        (["--dtype", "float31"], "--dtype must be one of auto, float32"),
        (["--block-size"], "--block-size needs a value; "),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_arguments(WorkerConfig, "prefill_worker", ["--model", "m", *arguments])
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- a\n- b\n", "must hold keys and values"),
        ("model: [", r"is not YAML: line 1, column 9: .+"),
        ("model: m\n**bold**: x\n", r"is not YAML: line 2, column \d+: .+"),
        ("model: \0", "is not YAML: .+"),
        ("model: m\nblock_size: sixteen\n", "block_size must be a whole number, not 'sixteen'"),
        ("model: m\nblock_size: 1.5\n", "block_size must be a whole number, not 1.5"),
        ("model: m\nblock_size: true\n", "block_size must be a whole number, not True"),
        ("model: m\nlease_s: [1]\n", "lease_s must be a number"),
        ("model: {a: b}\n", "model must be a text"),
        ("model: m\ndtype: float31\n", "dtype must be one of auto, float32"),
    ],
)
def test_a_malformed_settings_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(WorkerConfig, {"config": file}, {})
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"placement": "auto", "explore": 0.6}, "--explore must be from 0 to 0.5"),
        ({"placement": "auto", "explore": -0.1}, "--explore must be from 0 to 0.5"),
        ({"explore": 0.02}, "--explore needs --placement auto, not prefix-aware"),
    ],
)
def test_exploration_is_a_small_share_under_the_policy_that_predicts(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(RouterConfig, {"model": "m", **settings}, {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config(WorkerConfig, {"config": tmp_path / "none.yaml"}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("num_blocks", -1),
        ("max_num_seqs", 0),
        ("max_prefill_tokens", 0),
        ("max_queue", 0),
        ("max_model_len", -1),
        ("max_input_length", -1),
        ("max_output_length", -1),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("local_rank", -1),
        ("local_world_size", 0),
        ("num_threads", -1),
        ("kv_cache_memory", "much"),
        ("kv_cache_memory", "-1MiB"),
        ("kv_cache_memory", "infGiB"),
        ("kv_transports", "shm,pigeon"),
        ("kv_transports", " , "),
        ("lease_s", 0.0),
        ("lease_s", float("nan")),
        ("max_lease_s", 1.0),
        ("read_timeout_s", 0.0),
        ("read_stall_timeout_s", 0.0),
        ("watermark", 1.0),
        ("registration_ttl_s", 0.0),
        ("member_id", "a@b"),
        ("cluster_name", ""),
        ("port", 65536),
        ("dtype", "int3"),
        ("heartbeat_s", 0.0),
        ("heartbeat_s", 3.0),
        ("stream_grace_s", -1.0),
    ],
)
def test_a_setting_out_of_its_range_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}|{name.replace('_', '-')}|size"):
        load_config(WorkerConfig, {"model": "m", name: value}, {})


@pytest.mark.parametrize(
    "name",
    [
        *("grpc_port", "max_attempts", "max_message_bytes", "request_timeout_s", "stream_grace_s"),
        *("breaker_failures", "breaker_max_pause_s"),
    ],
)
def test_a_routers_setting_out_of_its_range_is_refused_and_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        load_config(RouterConfig, {"model": "m", name: -1}, {})


@pytest.mark.parametrize("config_type", [WorkerConfig, RouterConfig])
def test_a_process_without_a_model_names_the_missing_flag(config_type: type[WorkerConfig] | type[RouterConfig]) -> None:
    with pytest.raises(ConfigError, match="--model is needed"):
        load_config(config_type, {}, {})


def test_the_model_name_is_its_folder_unless_set() -> None:
    assert _worker(["--model", "/models/tiny/"]).model_name == "tiny"
    assert _worker(["--model", "/models/tiny", "--served-model-name", "mine"]).model_name == "mine"


def test_the_echo_shows_changed_settings_and_no_secret() -> None:
    config = load_config(RouterConfig, {"model": "m", "api_key": "hunter2", "port": 9}, {})
    assert echo(config) == "model=m port=9 api_key=***"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://10.0.0.5:6379/0", "redis://10.0.0.5:6379/0"),
        ("rediss://me:hunter2@redis.example:6380/0", "rediss://***@redis.example:6380/0"),
        ("redis://:hunter@2@h:1/0?password=hunter2", "redis://***@h:1/0?***"),
    ],
)
def test_the_echo_shows_where_redis_is_and_not_its_password(url: str, shown: str) -> None:
    assert echo(load_config(RouterConfig, {"model": "m", "redis": url}, {})) == f"redis={shown} model=m"


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("7", 7), ("7B", 7), ("1.5KiB", 1536), ("2MiB", 2 << 20), ("3GiB", 3 << 30)]
)
def test_sizes_are_read_with_their_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


_NUMBERS = [
    (config_type, item.name)
    for config_type in (WorkerConfig, RouterConfig)
    for item in dataclasses.fields(config_type)
    if isinstance(item.default, int | float)
]


@pytest.mark.parametrize(("config_type", "name"), _NUMBERS)
def test_the_least_number_that_a_message_names_is_accepted(
    config_type: type[WorkerConfig] | type[RouterConfig], name: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(config_type, {"model": "m", name: -1}, {})
    message = str(refused.value)
    others = {"model": "m"} | ({"heartbeat_s": 1e-12} if config_type is WorkerConfig else {})
    for words, accepted, refused_too in (
        ("must not be negative", 0, -1e-9),
        ("must be from 0", 0, -1),
        ("must be at least 1", 1, 0),
        ("must be positive", 1e-9, 0),
    ):
        if f"{flag_of(name)} {words}," in message or f"{flag_of(name)} {words} to" in message:
            load_config(config_type, {**others, name: accepted}, {})
            with pytest.raises(ConfigError, match=words):
                load_config(config_type, {**others, name: refused_too}, {})


@pytest.mark.parametrize("name", ["kv_cache_memory", "swap_space", "prefix_disk_space", "prefix_host_memory"])
@pytest.mark.parametrize("text", ["3XB", "-1"])
def test_a_wrong_size_is_refused_with_its_flag(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be .*{text}"):
        load_config(WorkerConfig, {"model": "m", name: text}, {})


@pytest.mark.parametrize(
    ("name", "instead"), [("kv_cache_memory", "auto"), ("swap_space", "0"), ("prefix_host_memory", "")]
)
def test_the_message_about_a_wrong_size_names_the_other_allowed_values(name: str, instead: str) -> None:
    load_config(WorkerConfig, {"model": "m", name: instead}, {})
    with pytest.raises(ConfigError, match=f", or {instead or 'empty'}"):
        load_config(WorkerConfig, {"model": "m", name: "-1"}, {})


def test_lengths_given_to_tandem_up_reach_every_process() -> None:
    flags = {"model": "m", "max_input_length": 100, "kv_cache_dtype": "int8"}
    pools = Pools(num_prefill=1, num_decode=1)
    layout = Layout(flags=flags, num_threads=1, first=pools)
    router = layout.router(0, Ports(0, 0))
    workers = [layout.worker(slot) for slot in pools.slots()]
    assert all("--max-input-length=100" in spec.arguments for spec in (router, *workers))
    assert ["--kv-cache-dtype=int8" in spec.arguments for spec in (router, *workers)] == [False, True, True]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "router.example", ""])
def test_a_router_that_other_hosts_reach_without_a_key_does_not_start(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file or --keys, or bind to 127.0.0.1"):
        RouterConfig(model="m", host=host)
    for way_out in ({"api_key_file": "f"}, {"keys": "redis"}, {"api_key": "k"}):
        assert not RouterConfig(model="m", host=host, **way_out).is_open  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without a key"):
        RouterConfig(model="m", host=host, admin_key="k")  # every client may generate
    assert RouterConfig(model="m", host=host, insecure="on").is_insecure
    assert RouterConfig(model="m", host=host, api_key="k", metrics_port=9090).metrics_host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5"])
def test_a_worker_serves_metrics_to_other_hosts_only_with_a_key(host: str) -> None:
    assert WorkerConfig(model="m", host=host).metrics_host == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--metrics-key-file, or leave out --metrics-port"):
        WorkerConfig(model="m", host=host, metrics_port=9090)
    for way_out in ({"metrics_key_file": "f"}, {"insecure": "on"}):
        assert WorkerConfig(model="m", host=host, metrics_port=9090, **way_out).metrics_host == host  # type: ignore[arg-type]
    assert WorkerConfig(model="m", metrics_port=9090).metrics_host == "127.0.0.1"


@pytest.mark.parametrize(("flags", "value"), [((), "off"), (("--insecure",), "on"), (("--insecure", "off"), "off")])
def test_a_switch_may_be_given_without_a_value(flags: tuple[str, ...], value: str) -> None:
    assert parse_arguments(WorkerConfig, "prefill_worker", ["--model", "m", *flags]).insecure == value


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_router_that_only_its_own_host_reaches_needs_no_key(host: str) -> None:
    assert not RouterConfig(model="m", host=host).is_open
