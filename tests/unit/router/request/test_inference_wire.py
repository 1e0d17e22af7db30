"""Requests of clients on the wire: unset fields, and enum values of a later version."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from cluster.errors import InvalidRequest
from cluster.protocol.field_rules import LONGEST_S
from router.grpc_api.inference_wire import chat_from_wire, generate_request_from_wire
from router.grpc_api.service import _timeout_s
from tandem.v1 import inference_pb2

UNKNOWN = 77


def enum_fields(message: Any, path: str = "") -> Iterator[tuple[str, Message, Field]]:
    """Yield every field of an enum type in a message, with the part that has it. Missing parts are added."""
    for field in message.DESCRIPTOR.fields:
        if field.enum_type is not None:
            yield f"{path}{field.name}", message, field
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue  # of scalars: no map of the protocol has other values
        elif field.message_type is not None and field.is_repeated:
            yield from enum_fields(getattr(message, field.name).add(), f"{path}{field.name}.")
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            yield from enum_fields(getattr(message, field.name), f"{path}{field.name}.")


def test_every_enum_of_a_request_is_refused_by_name_where_its_value_is_unknown() -> None:
    found = []
    for path, _, _ in enum_fields(inference_pb2.GenerateRequest()):
        request = inference_pb2.GenerateRequest()
        part, field = next((part, field) for other, part, field in enum_fields(request) if other == path)
        setattr(part, field.name, UNKNOWN)
        if path.startswith("chat"):
            request.chat.SetInParent()
        else:
            request.text = "x"
        received = inference_pb2.GenerateRequest.FromString(request.SerializeToString())
        assert field.enum_type is not None
        expected = rf"{field.name}: {UNKNOWN} is not a valid {field.enum_type.name}: the known ones are \w+"
        with pytest.raises(InvalidRequest, match=expected):
            generate_request_from_wire(received, None)
        found.append(path)
    assert sorted(found) == [
        "chat.messages.role",
        "chat.tool_choice",
        "grammar.kind",
        "resume_from.choices.finish_reason",
    ]


def test_a_message_of_a_conversation_without_a_role_is_refused() -> None:
    chat = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(content="x")])
    with pytest.raises(InvalidRequest, match="has no role: set one of system, user, assistant"):
        chat_from_wire(chat)


def test_unset_latency_targets_differ_from_targets_of_zero_which_validation_refuses() -> None:
    unset = generate_request_from_wire(inference_pb2.GenerateRequest(text="x"), None)
    assert (unset.slo_ttft_s, unset.slo_tpot_s) == (None, None)
    zero = generate_request_from_wire(inference_pb2.GenerateRequest(text="x", slo_ttft_s=0.0, slo_tpot_s=0.0), None)
    assert (zero.slo_ttft_s, zero.slo_tpot_s) == (0.0, 0.0)


def test_an_unset_stream_interval_sends_every_token_by_itself() -> None:
    for sent, interval in ((0, 1), (16, 16)):
        message = inference_pb2.GenerateRequest(text="x", stream_interval=sent)
        assert generate_request_from_wire(message, None).stream_interval == interval


def test_a_call_with_a_deadline_in_centuries_has_the_longest_timeout() -> None:
    """Clients write a large number where they want no deadline."""
    assert _timeout_s(3.6e11) == LONGEST_S
    assert _timeout_s(600.0) == pytest.approx(600, rel=0.01)
