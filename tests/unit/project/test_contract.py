"""The .proto files are complete, and the committed stubs equal the stubs that they generate."""

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[3]
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))
# Field numbers of each kind of element in its parent, as in SourceCodeInfo.Location.path.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _ONEOFS = 2, 3, 4, 8
_VALUES = _METHODS = 2


def _protoc(*arguments: str) -> None:
    command = (sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *arguments, *map(str, PROTOS))
    subprocess.run(command, check=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    """Return the descriptors of our files, with their comments."""
    path = tmp_path_factory.mktemp("descriptors") / "all"
    _protoc(f"--descriptor_set_out={path}", "--include_source_info")
    return list(FileDescriptorSet.FromString(path.read_bytes()).file)


def test_the_committed_stubs_equal_the_generated_ones(tmp_path: Path) -> None:
    assert importlib.metadata.version("grpcio-tools") == "1.76.0"  # stubs refuse a grpcio older than what made them
    _protoc(*(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")))
    generated, committed = _stubs_below(tmp_path), _stubs_below(ROOT)
    assert sorted(generated) == sorted(committed)
    assert [name for name in generated if generated[name] != committed[name]] == [], "run `make proto`"


def _stubs_below(root: Path) -> dict[str, str]:
    found = (path for pattern in ("*_pb2*.py", "*_pb2*.pyi") for path in (root / "tandem").rglob(pattern))
    return {str(path.relative_to(root)): path.read_text() for path in found}


def test_every_service_message_field_and_value_has_a_comment(files: list[FileDescriptorProto]) -> None:
    without = []
    for file in files:
        commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
        without += [f"{file.name}: {name}" for path, name in _elements(file) if path not in commented]
    assert not without


def test_field_numbers_have_no_gaps_before_the_first_release(files: list[FileDescriptorProto]) -> None:
    messages = [message for file in files for _, _, message in _messages_of(file)]
    assert [
        message.name
        for message in messages
        if sorted(field.number for field in message.field) != list(range(1, len(message.field) + 1))
        or message.reserved_range
    ] == []


def test_every_enum_has_an_unspecified_zero_and_values_with_its_name(files: list[FileDescriptorProto]) -> None:
    enums = [enum for file in files for enum in file.enum_type]
    nested = [enum for file in files for _, _, message in _messages_of(file) for enum in message.enum_type]
    assert len(enums) == 13 and len(nested) == 1
    for enum in (*enums, *nested):
        prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in enum.name).lstrip("_")
        assert [value.number for value in enum.value] == list(range(len(enum.value))), enum.name
        assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.value)


def test_every_file_names_its_packages_in_other_languages(files: list[FileDescriptorProto]) -> None:
    for file in files:
        folder = file.package.replace(".", "/")
        assert file.name.startswith(f"{folder}/")
        assert file.options.go_package.partition(";")[0] == folder
        assert (file.options.java_package, file.options.java_multiple_files) == (file.package, True)


def test_the_public_protocol_does_not_need_the_internal_one(files: list[FileDescriptorProto]) -> None:
    public = [file for file in files if file.package == "tandem.v1"]
    assert {service.name for file in public for service in file.service} == {"Inference", "Admin"}
    assert [name for file in public for name in file.dependency if "/internal/" in name] == []


def _elements(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield path and name of every element of a file that needs a comment."""
    yield (12,), "the file itself"  # the comment before `syntax`
    for path, prefix, message in _messages_of(file):
        yield path, prefix
        yield from _named(message.field, (*path, _FIELDS), prefix)
        yield from _named(message.oneof_decl, (*path, _ONEOFS), prefix, skip=_presence_oneofs(message))
        yield from _enums(message.enum_type, (*path, _NESTED_ENUMS), prefix)
    yield from _enums(file.enum_type, (_ENUMS,), file.package)
    for number, service in enumerate(file.service):
        yield (_SERVICES, number), service.name
        yield from _named(service.method, (_SERVICES, number, _METHODS), service.name)


def _messages_of(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str, DescriptorProto]]:
    waiting: list[tuple[tuple[int, ...], str, DescriptorProto]] = [
        ((_MESSAGES, number), message.name, message) for number, message in enumerate(file.message_type)
    ]
    while waiting:
        path, name, message = waiting.pop()
        yield path, name, message
        waiting += [
            ((*path, _NESTED, number), f"{name}.{inner.name}", inner)
            for number, inner in enumerate(message.nested_type)
            if not inner.options.map_entry
        ]


def _enums(enums: Any, path: tuple[int, ...], prefix: str) -> Iterator[tuple[tuple[int, ...], str]]:
    for number, enum in enumerate(enums):
        yield (*path, number), f"{prefix}.{enum.name}"
        yield from _named(enum.value, (*path, number, _VALUES), enum.name)


def _named(
    elements: Any, path: tuple[int, ...], prefix: str, skip: frozenset[int] = frozenset()
) -> Iterator[tuple[tuple[int, ...], str]]:
    for number, element in enumerate(elements):
        if number not in skip:
            yield (*path, number), f"{prefix}.{element.name}"


def _presence_oneofs(message: DescriptorProto) -> frozenset[int]:
    """Return the oneofs that protoc adds for `optional` fields."""
    return frozenset(field.oneof_index for field in message.field if field.proto3_optional)
