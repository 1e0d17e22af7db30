"""The conclusions of `tandem doctor` from its findings."""

import argparse
import json
from pathlib import Path

import pytest

from cli.machine import Finding, look
from cli.verbs.preparation import doctor
from cli.verbs.preparation.doctor import PairReport, report, unmeasured
from cluster.auth.key_file import load_keys
from cluster.errors import ConfigError
from kvtransfer.importer.links import DOES_NOT_REACH
from tandem.enum_words import MEMBER_ROLES
from tandem.internal.v1 import worker_pb2
from tandem.v1 import admin_pb2

BOTH = ("shm", "tcp")


def answer(**paths: float | str) -> worker_pb2.CheckLinkResponse:
    """Return a link check's answer: by transport, best first, the speed in GB/s or the reason of a failure."""
    message = worker_pb2.CheckLinkResponse(num_bytes=1 << 20)
    for transport, found in paths.items():
        if isinstance(found, str):
            message.paths.add(transport=transport, reason=found)
        else:
            message.paths.add(transport=transport, bytes_per_s=found * 1e9, latency_s=50e-6)
    return message


def test_the_first_transport_that_works_is_chosen() -> None:
    told = report("d0", "p0", answer(shm=8.0, tcp=1.0, nccl="no GPU"), shared=BOTH)
    assert (told.chosen, told.problems, told.advice) == ("shm", (), "")
    lines = told.as_text().splitlines()
    assert lines[0] == "d0 reads p0, at most 1 MiB at once"
    assert [line.split()[:4] for line in lines[2:4]] == [["shm", "yes", "8.00", "50"], ["tcp", "-", "1.00", "50"]]
    assert lines[4].split(maxsplit=4)[-1] == "no GPU"


def test_a_common_transport_that_fails_is_a_problem() -> None:
    told = report("d0", "p0", answer(shm="mapping the pool: denied", tcp=1.0), shared=BOTH)
    assert told.chosen == "tcp"
    assert told.problems == ("shm: mapping the pool: denied",)
    assert "problem: shm: mapping the pool: denied" in told.as_text()


def test_different_hosts_and_transports_that_one_worker_lacks_are_no_problem() -> None:
    told = report("d0", "p0", answer(shm=f"on p0: {DOES_NOT_REACH}", tcp=1.0, nccl="on d0: no GPU"), shared=BOTH)
    assert told.problems == ()
    assert told.chosen == "tcp"


def test_a_pair_without_a_common_transport_is_a_problem() -> None:
    told = report("d0", "p0", answer(shm=f"on p0: {DOES_NOT_REACH}"), shared=("shm",))
    assert told.chosen == ""
    assert told.problems == ("no transport works between them: prompts are prefilled on the decode worker",)


def test_a_later_transport_that_is_much_faster_is_reported() -> None:
    assert report("d0", "p0", answer(shm=1.0, tcp=1.4), shared=BOTH).advice == ""
    assert (
        report("d0", "p0", answer(shm=1.0, tcp=2.0), shared=BOTH).advice
        == "tcp was faster here: --kv-transports tcp,shm"
    )


def test_doctor_finds_no_problem_on_this_machine() -> None:
    findings = {finding.subject: finding for finding in look()}
    assert not [finding for finding in findings.values() if finding.is_problem and finding.subject != "CUDA"]
    assert findings["transport tcp"].text.startswith("works on this machine")
    assert findings["torch"].text.startswith("2.")


@pytest.mark.parametrize(
    ("machine", "cluster", "status"),
    [
        ([Finding("python", "fine")], doctor.ClusterReport("r:1", (), ()), 0),
        ([Finding("python", "3.8", True)], doctor.ClusterReport("r:1", (), ()), 1),
        ([], doctor.ClusterReport("r:1", (), ("prefill-0 has not answered for 9.0 s",)), 1),
        ([], doctor.ClusterReport("r:1", (unmeasured("d0", "p0", "it does not answer"),), ()), 1),
        ([], doctor.ClusterReport("r:1", (report("d0", "p0", answer(shm=1.0), shared=BOTH),), ()), 0),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_the_exit_status_is_1_if_there_is_any_problem(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: list[Finding],
    cluster: doctor.ClusterReport,
    status: int,
    as_json: bool,
) -> None:
    monkeypatch.setattr(doctor, "look", lambda: machine)
    monkeypatch.setattr(doctor, "_cluster_report", lambda arguments: cluster)
    assert doctor.run(argparse.Namespace(json=as_json)) == status
    output = capsys.readouterr().out
    for problem in (*cluster.problems, *(problem for pair in cluster.pairs for problem in pair.problems)):
        assert problem in output
    if as_json:
        assert json.loads(output)["router"] == "r:1"


def test_an_unreachable_worker_is_a_problem_of_its_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TANDEM_TLS_CA", raising=False)
    importer = admin_pb2.MemberStatus(
        member_id="d0", incarnation="1", role=admin_pb2.MEMBER_ROLE_DECODE, address="127.0.0.1:1"
    )
    exporter = admin_pb2.MemberStatus(
        member_id="p0", incarnation="1", role=admin_pb2.MEMBER_ROLE_PREFILL, address="127.0.0.1:1"
    )
    load_keys(tmp_path / "key")
    arguments = argparse.Namespace(
        address="127.0.0.1:2",
        tls_ca=None,
        tls_server_name=None,
        tls_cert=None,
        tls_key=None,
        blocks=0,
        cluster_key_file=str(tmp_path / "key"),
    )
    told = doctor._measured(importer, exporter, arguments)
    assert (told.importer, told.exporter, told.paths) == ("d0", "p0", ())
    assert "127.0.0.1:1" in told.problems[0]


def test_doctor_checks_every_pair_of_workers_or_the_named_pair() -> None:
    roles = {"r": "router", "p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    members = [admin_pb2.MemberStatus(member_id=name, role=MEMBER_ROLES.number(role)) for name, role in roles.items()]
    pairs = [(importer.member_id, exporter.member_id) for importer, exporter in doctor._wanted(members, None)]
    assert pairs == [("d0", "p0"), ("d0", "p1"), ("d1", "p0"), ("d1", "p1")]
    ((importer, exporter),) = doctor._wanted(members, ["d0", "d1"])
    assert (importer.member_id, exporter.member_id) == ("d0", "d1")
    with pytest.raises(ConfigError, match="no worker r; there are d0, d1, p0, p1"):
        list(doctor._wanted(members, ["d0", "r"]))


def test_the_json_report_is_complete() -> None:
    told: PairReport = report("d0", "p0", answer(tcp=1.0), shared=BOTH)
    assert json.loads(json.dumps(told.as_json()))["paths"][0]["transport"] == "tcp"
