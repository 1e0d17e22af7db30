"""Tests of inputs that a fuzzer found: they ended a process, or were answered with 500."""

import json
from pathlib import Path

import pytest

from cli.connection import _read as read_last_cluster
from cli.verbs.generation.batch import kept_lines, read_requests
from cluster.accounts.keys import KeySet
from cluster.auth.keys import ClusterKeys, Purpose
from cluster.errors import ConfigError, InvalidRequest, RegistryUnavailable
from cluster.grammar.tokenizer_files import read_json
from cluster.messages import Grammar, GrammarKind, LayoutFingerprint
from cluster.registry.scale_registry import _target as scale_target
from cluster.registry.signed_records import SignedRecords
from cluster.settings.config import RouterConfig
from cluster.settings.config_sources import load_config
from prefill_worker.prefixes.tier_storage import BlockFiles
from router.http.anthropic.api import arguments_object
from router.http.openai_schema import CompletionRequest
from router.request.divided_answers import ChatSettings
from router.requests import ChatMessage, ChatPrompt, GenerateRequest, ToolCall
from router.text.chat_template import ChatTemplate
from router.text.tokenization import Tokenization
from router.tools.call_forms import CallableTool
from router.tools.constraint import ToolUse
from tests.system.rigs.members.registry_rig import member

_NESTED = "[" * 100_000
_ALL_ARGUMENTS = "{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize("answer", [["1"], ["1"] * 9, ["x", *["1"] * 7], ["1e9", *["1"] * 7]])
def test_a_scale_target_that_another_program_wrote_does_not_end_a_router(answer: list[str]) -> None:
    with pytest.raises(RegistryUnavailable, match="scale target in Redis cannot be read"):
        scale_target(answer)


def test_a_foreign_file_in_a_tiers_folder_is_not_a_block(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path, LayoutFingerprint("weights", "config", "float32", "table"), 64)
    for name in ("x" * 32, "0" * 32):
        (files._folder / name).write_bytes(bytes(BlockFiles.file_bytes(64)))
    assert files.hashes() == [bytes(16)]
    files.close()


_MALFORMED = ("!!int x", "!!float x", "!!timestamp x", "port: " + "9" * 400, "[" * 1200, "slo_tpot_ms: 1" + "0" * 400)


@pytest.mark.parametrize("text", _MALFORMED)
def test_a_settings_file_with_a_malformed_value_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(RouterConfig, {"config": str(path), "model": "m"}, {})


def test_unreadable_records_of_api_keys_are_refused_even_if_they_are_signed() -> None:
    keys = ClusterKeys(b"k" * 32)
    for body in (_NESTED, "[]", "{}", '{"version": 1, "records": [{"id": 1}]}'):
        signed = json.dumps({"body": body, "signature": keys.sign(Purpose.KEY_RECORDS, body.encode()).hex()})
        for document in (signed, body):
            with pytest.raises(ConfigError):
                KeySet.parse(document, keys)


def test_a_deeply_nested_line_of_a_batch_names_its_line() -> None:
    with pytest.raises(ConfigError, match="in, line 1: not JSON"):
        read_requests([_NESTED + "\n"], "in")
    with pytest.raises(ConfigError, match="out, line 1 is not an answer"):
        kept_lines([_NESTED + "\n", "\n"], "out", [])


@pytest.mark.parametrize("text", ["7", "[]", '{"more_grpc": 1}', _NESTED])
def test_a_damaged_file_of_the_last_cluster_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster-1.json"
    path.write_text(text)
    assert read_last_cluster(path) is None


def test_deeply_nested_model_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(_NESTED)
    with pytest.raises(ConfigError, match="cannot read"):
        read_json(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{{" + _NESTED[:5000], {})


def test_a_number_of_many_digits_in_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{{ " + "9" * 5000 + " }}", {})


@pytest.mark.parametrize(("custom_id", "status_code"), [("1", "r"), ("1", []), ([], 200)])
def test_an_answer_of_a_batch_with_values_of_other_types_names_its_line(custom_id: object, status_code: object) -> None:
    line = json.dumps({"custom_id": custom_id, "response": {"status_code": status_code}})
    with pytest.raises(ConfigError, match="out, line 1 is not an answer"):
        kept_lines([line + "\n"], "out", ["1"])


def test_deeply_nested_arguments_of_a_call_are_a_text() -> None:
    """They come from a client with its conversation, and from a model in its answer."""
    calls = (ToolCall("1", "f", _NESTED),)
    prompt = ChatTemplate(_ALL_ARGUMENTS, {}).render([ChatMessage("assistant", "", tool_calls=calls)], 0)
    assert json.loads(prompt) == _NESTED
    assert arguments_object(_NESTED) == {"invalid_json": _NESTED}


def test_arguments_that_a_template_cannot_write_refuse_the_request() -> None:
    """Arguments that are nested just less deeply than JSON is read, in a list around them."""
    template = ChatTemplate("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", {})
    with pytest.raises(InvalidRequest, match="fails on these messages"):
        template.render([ChatMessage("user", "x")], 0)


@pytest.mark.parametrize("echo", [False, True])
def test_a_huge_n_does_not_stop_the_event_loop_of_a_router(echo: bool) -> None:
    body = CompletionRequest.model_validate({"prompt": ["x"], "n": (1 << 31) - 1, "echo": echo})
    assert len(body.echoes()) == (128 if echo else 0)


def test_a_chat_with_tools_and_a_grammar_is_refused_where_the_router_parses_no_calls() -> None:
    tool, model = CallableTool("f", {"type": "object"}), Path(__file__).parents[2] / "examples" / "demo_model"
    request = GenerateRequest(prompt=ChatPrompt((ChatMessage("user", "x"),)), grammar=Grammar(GrammarKind.REGEX, "a"))
    with pytest.raises(InvalidRequest, match="this router parses no tool calls"):
        ChatSettings().constrained(request, ToolUse((tool,)), Tokenization.load(str(model)))


def test_a_registration_whose_text_cannot_be_encoded_is_refused_and_the_others_are_read() -> None:
    keys, refused = ClusterKeys(b"k" * 32), list[str]()
    records = SignedRecords(keys, "tandem", lambda reason, identifier: refused.append(f"{identifier}: {reason}"))
    signature = keys.sign(Purpose.REGISTRATIONS, b"").hex()
    other = member()
    stored = [
        ("d9", json.dumps({"version": "1 0", "body": "\ud800", "signature": signature})),
        (other.id.id, records.sign(other, 1)),
    ]
    found = records.read(stored, 0.0)
    assert found == [other] and refused == ["d9: no_proof"]
