"""API keys: their signed records, who a caller is, and what stores that lose or change records can do."""

import asyncio
import json
from pathlib import Path

import pytest

from cluster.accounts.audit import Audit
from cluster.accounts.key_store import FileKeyStore, RecordedKeys, configured_key
from cluster.accounts.keys import Access, Caller, Gate, KeyRecord, KeySet, Limits, new_key, tenant_salt
from cluster.auth.keys import CachePurpose, ClusterKeys, Secrets
from cluster.errors import ConfigError, InvalidRequest, NotFound, PermissionDenied, Unauthenticated
from router.running import running

_SIGNING = ClusterKeys(b"k" * 32)
_INFERENCE = frozenset({Access.INFERENCE})


def made(tenant: str = "acme", access: frozenset[Access] = _INFERENCE) -> tuple[str, KeyRecord]:
    return new_key(Caller(tenant, access=access, limits=Limits(600, 200_000, 32), weight=3, max_priority=0))


def bearer(key: str) -> str:
    return f"Bearer {key}"


def test_a_key_has_256_random_bits_and_its_record_has_only_a_hash() -> None:
    key, record = made()
    other, _ = made()
    assert key != other and len(key.removeprefix("tandem-")) == 43  # of 6 bits each
    document = KeySet().with_record(record).signed(_SIGNING)
    assert key.removeprefix("tandem-") not in document and record.digest in document


def test_a_signed_set_is_read_unchanged() -> None:
    keys = KeySet().with_record(made()[1]).with_record(made("other", frozenset(Access))[1])
    assert keys.version == 2
    assert KeySet.parse(keys.signed(_SIGNING), _SIGNING) == keys


def test_a_changed_document_or_one_of_another_cluster_is_refused() -> None:
    document = KeySet().with_record(made()[1]).signed(_SIGNING)
    changed = document.replace("inference", "admin")
    for text in (changed, document[:-1], "", "{}", "[1]", '{"body": "{}", "signature": 3}'):
        with pytest.raises(ConfigError, match="not signed"):
            KeySet.parse(text, _SIGNING)
    with pytest.raises(ConfigError, match="not signed"):
        KeySet.parse(document, ClusterKeys(b"x" * 32))


@pytest.mark.parametrize(
    "caller",
    [
        Caller("", access=_INFERENCE),
        Caller("x" * 65, access=_INFERENCE),
        Caller("line\n", access=_INFERENCE),
        Caller("acme"),
        Caller("acme", access=_INFERENCE, weight=0),
        Caller("acme", access=_INFERENCE, max_priority=1 << 31),
    ],
)
def test_a_record_with_senseless_values_is_refused(caller: Caller) -> None:
    with pytest.raises(InvalidRequest):
        new_key(caller)


def test_an_inference_key_is_no_admin_key_and_an_admin_key_is_every_key() -> None:
    gate = Gate(has_records=True)
    (user, user_record), (scraper, scraper_record), (admin, admin_record) = (
        made(access=frozenset({access})) for access in Access
    )
    gate.replace(KeySet().with_record(user_record).with_record(scraper_record).with_record(admin_record))
    allowed = {
        name: [access for access in Access if gate.caller(bearer(key)).may(access)]
        for name, key in (("user", user), ("scraper", scraper), ("admin", admin))
    }
    assert allowed == {"user": [Access.INFERENCE], "scraper": [Access.METRICS], "admin": list(Access)}
    with pytest.raises(PermissionDenied, match=f"{user_record.key_id} does not allow admin"):
        gate.admit(bearer(user), Access.ADMIN)
    assert gate.admit(bearer(scraper), None).key_id == scraper_record.key_id
    for scheme in ("bearer ", "BEARER  "):  # its case does not matter, the key's does
        assert gate.admit(scheme + user, Access.INFERENCE).key_id == user_record.key_id
    for shown, problem in (
        ("", "send an API key"),
        ("Bearer ", "send an API key"),
        (bearer("wrong"), "the API key that was sent is unknown here; send an API key"),
        (user, "send an API key"),
        (bearer(user.lower()), "the API key that was sent is unknown here; send an API key"),
    ):
        for access in (None, *Access):
            with pytest.raises(Unauthenticated, match=f"^{problem}"):
                gate.admit(shown, access)


def test_the_calls_that_need_a_key_follow_from_the_configured_keys() -> None:
    needs = {
        name: [access for access in Access if not gate.caller("").may(access)]
        for name, gate in (
            ("none", Gate()),
            ("admin", Gate(admin_key="a")),
            ("api", Gate(api_key="k")),
            ("recorded", Gate(has_records=True)),
        )
    }
    assert needs == {"none": [], "admin": [Access.ADMIN], "api": list(Access), "recorded": list(Access)}
    with pytest.raises(PermissionDenied):
        Gate(api_key="k").admit("Bearer k", Access.ADMIN)
    assert Gate(api_key="k", admin_key="a").admit("Bearer a", Access.INFERENCE).key_id == "admin-key"


def test_an_older_set_never_replaces_a_newer_one() -> None:
    gate = Gate(has_records=True)
    key, record = made()
    old = KeySet().with_record(record)
    assert gate.replace(old) and gate.caller(bearer(key)).tenant == "acme"
    assert gate.replace(old.without(record.key_id)) and not gate.caller(bearer(key)).access
    assert not gate.replace(old) and not gate.caller(bearer(key)).access
    with pytest.raises(NotFound, match="no API key has the id"):
        gate.keys.without(record.key_id)


async def test_a_file_with_lost_or_forged_records_changes_no_access(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    gate = Gate(has_records=True)
    keys = RecordedKeys(FileKeyStore(path), gate, _SIGNING)
    (first, first_record), (second, second_record) = made(), made()
    await keys.change(lambda present: present.with_record(first_record))
    old = path.read_text()
    assert path.stat().st_mode & 0o077 == 0
    await keys.change(lambda present: present.with_record(second_record).without(first_record.key_id))
    new = path.read_text()
    for harm in (old, "{}", "", None):
        path.unlink() if harm is None else path.write_text(harm)
        await keys.refresh()
        assert gate.caller(bearer(second)).access and not gate.caller(bearer(first)).access
        if harm != "{}":
            assert path.read_text() == new, "a router gives a store back what it lost"


async def test_records_outlive_the_replacement_of_the_clusters_secret(tmp_path: Path) -> None:
    old, new = b"k" * 32, b"n" * 32
    gate, path = Gate(has_records=True), tmp_path / "keys.json"
    key, record = made()
    await RecordedKeys(FileKeyStore(path), gate, ClusterKeys(old)).change(lambda present: present.with_record(record))
    for step in (Secrets(old, new), Secrets(new, old), Secrets(new)):
        gate = Gate(has_records=True)
        await RecordedKeys(FileKeyStore(path), gate, ClusterKeys(step)).refresh()
        assert gate.caller(bearer(key)).key_id == record.key_id, step


async def test_a_change_of_the_file_reaches_a_router_that_follows_it(tmp_path: Path) -> None:
    gates = Gate(has_records=True), Gate(has_records=True)
    writer, reader = (RecordedKeys(FileKeyStore(tmp_path / "keys.json"), gate, _SIGNING) for gate in gates)
    key, record = made()
    changed = asyncio.Event()
    replace = gates[1].replace

    def replaced(keys: KeySet) -> bool:
        is_used = replace(keys)
        if keys.version:
            changed.set()
        return is_used

    gates[1].replace = replaced  # type: ignore[method-assign]
    async with running(reader.follow()), asyncio.timeout(20):
        await writer.change(lambda present: present.with_record(record))
        await changed.wait()
    assert gates[1].caller(bearer(key)).key_id == record.key_id


def test_a_cache_salt_belongs_to_one_tenant_of_one_cluster() -> None:
    key, other = (ClusterKeys(secret * 32).cache_key(CachePurpose.SALTS) for secret in (b"k", b"x"))
    asked = [(key, "acme", ""), (key, "acme", "team"), (key, "acmet", "eam"), (key, "other", ""), (other, "acme", "")]
    salts = [tenant_salt(*each) for each in asked]
    assert len(set(salts)) == len(salts) and tenant_salt(*asked[1]) == salts[1]
    assert all(len(salt) == 64 for salt in salts)
    assert tenant_salt(key, "", "mine") == "mine", "without tenants nothing changes"


def test_a_key_file_is_private_and_has_one_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        configured_key("", str(path), "--admin-key")
    path.chmod(0o600)
    assert configured_key("", str(path), "--admin-key") == "s3cret"
    with pytest.raises(ConfigError, match="not both"):
        configured_key("other", str(path), "--admin-key")
    path.write_text("one\ntwo\n")
    with pytest.raises(ConfigError, match="one line"):
        configured_key("", str(path), "--admin-key")


def test_the_audit_file_has_one_line_of_json_per_event(tmp_path: Path) -> None:
    audit = Audit(str(tmp_path / "audit.jsonl"), wall_clock=lambda: 12.0)
    who = Caller("acme", "1234")
    audit.record(who=who, what="Drain", origin="ipv4:127.0.0.1:5", outcome="ok", request={"member_id": "a\nb"})
    audit.record(who=None, what="Drain", origin="ipv4:127.0.0.1:6", outcome="unauthenticated")
    first, second = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert first == {
        "time": 12.0,
        "who": {"key": "1234", "tenant": "acme"},
        "what": "Drain",
        "from": "ipv4:127.0.0.1:5",
        "outcome": "ok",
        "request": {"member_id": "a\nb"},
    }
    assert second["who"] is None and second["outcome"] == "unauthenticated"


def test_a_line_that_a_full_disk_refuses_goes_to_the_process_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = Audit("/dev/full")
    audit.record(who=None, what="Drain", origin="ipv4:127.0.0.1:6", outcome="unauthenticated")
    (line,) = caplog.messages
    assert line.startswith("cannot write to --audit-file /dev/full: No space left on device; the line is: {")
    assert json.loads(line.partition("the line is: ")[2])["what"] == "Drain"
    assert not capsys.readouterr().err, "no traceback is printed"


def test_refused_peers_are_audited_at_most_once_per_second_with_the_number_left_out(tmp_path: Path) -> None:
    now = [0.0]
    audit = Audit(str(tmp_path / "audit.jsonl"), monotonic=lambda: now[0])
    for now[0] in (0.0, 0.1, 0.2, 1.1):
        audit.record_refusal(what="KV connection", origin=f"ipv4:10.0.0.1:{now[0]}", why="no_proof", claims="d0@1\n")
        audit.record_refusal(what="registration", origin="registry", why="unknown_key")
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["what"], line["left_out"]) for line in lines] == [
        ("KV connection", 0),
        ("registration", 0),
        ("KV connection", 2),
        ("registration", 2),
    ]
    assert lines[2]["from"] == "ipv4:10.0.0.1:1.1" and lines[2]["claims"] == "d0@1\n" and lines[2]["who"] is None
    assert {line["outcome"] for line in lines} == {"member_refused"}


def test_lines_about_refused_strangers_are_bounded_whatever_addresses_and_methods_they_have(tmp_path: Path) -> None:
    now_s, path = [0.0], tmp_path / "audit.jsonl"
    audit = Audit(str(path), monotonic=lambda: now_s[0])
    for now_s[0] in (0.0, 1.5, 3.0):
        num_lines = len(path.read_text().splitlines())
        for number in range(2_000):
            audit.record_refusal(what=f"/method{number}", origin=f"ipv4:10.0.0.{number % 256}:1", why="no_proof")
        assert 256 <= len(path.read_text().splitlines()) - num_lines <= 257
    now_s[0] = 4.5
    for number in range(300):  # the last one has the count of all others
        audit.record_refusal(what=f"/new{number}", origin="ipv4:10.0.0.1:1", why="no_proof")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) + sum(line["left_out"] for line in lines) >= 3 * 2_000
