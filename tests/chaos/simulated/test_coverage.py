"""Every failure reason is reached by a test, and every row of docs/failover.md by a schedule or a named test.

A reason is reached by the simulated schedules whose coverage is kept in benchmarks/results, or by the test that
`REACHED_BY` names for it.
"""

import ast
import json
import re
from pathlib import Path

from tests.chaos.simulated.coverage import error_kinds
from tests.chaos.simulated.failover_rows import ELSEWHERE, EVIDENCE, rows
from tests.chaos.simulated.reasons import every_reason, is_reached
from tests.chaos.simulated.record import RESULTS

_ROOT = Path(__file__).parents[3]
_BASES = frozenset({"resume_refused"})  # of a class that only its subclasses are raised of
REACHED_BY = {
    "deferred": ("tests/system/test_migration.py::test_a_worker_that_freezes_no_more_is_asked_again"),
    "first_token_count": (
        "tests/system/test_failover.py::test_a_worker_that_does_not_name_every_first_token_is_not_gone_on_from"
    ),
    "handshake": ("tests/unit/test_silent_connections.py::test_every_wait_for_a_client_ends"),
    "replaced": (
        "tests/unit/test_silent_connections.py"
        "::test_silent_connections_keep_to_the_bound_and_a_good_client_is_served_meanwhile"
    ),
    "too_many_frozen": (
        "tests/unit/test_decode_exports.py::test_a_worker_freezes_at_most_four_at_a_time_for_all_routers"
    ),
    "unverified_provenance": (
        "tests/contract/test_handoff_verify.py::test_what_a_worker_took_unverified_is_not_taken_by_one_that_verifies"
    ),
    "acceptance_invalid": ("tests/unit/test_request_acceptance.py::test_no_byte_of_it_can_be_changed"),
    "acceptance_missing": ("tests/system/test_takeover.py::test_nobody_takes_over_a_live_stream_by_its_id"),
    "acceptance_of_another_client": (
        "tests/system/test_takeover.py::test_an_acceptance_belongs_to_the_api_key_of_its_request"
    ),
    "colocated": (
        "tests/system/test_pipeline.py::test_without_any_prefill_pool_decode_does_both_and_that_is_no_fallback"
    ),
    "deadline_exceeded": ("tests/system/test_pipeline.py::test_no_worker_until_the_deadline_is_told_so"),
    "invalid_request": ("tests/system/test_scale_target.py::test_what_no_cluster_can_have_is_refused"),
    "malformed_handoff_message": (
        "tests/contract/test_handoff_malformed.py::test_whatever_an_exporter_says_ends_that_hand_off_only"
    ),
    "malformed_message": ("tests/contract/test_handoff_versions.py::test_versions_that_are_no_range_are_refused"),
    "open_failed": ("tests/unit/test_handoff.py::test_channel_that_does_not_open_leaves_nothing_to_wait_for"),
    "overloaded": ("tests/contract/test_probe.py::test_one_measurement_goes_on_at_a_time"),
    "prompt_changed": ("tests/unit/test_request_acceptance.py::test_another_prompt_is_refused_by_name"),
    "request_changed": (
        "tests/unit/test_request_acceptance.py::test_other_parameters_than_those_accepted_are_refused_by_name"
    ),
    "request_too_large": ("tests/system/test_takeover.py::test_what_is_admitted_can_be_resumed_with_all_its_tokens"),
    "stale_incarnation": ("tests/contract/test_handoff_refusals.py::test_a_ticket_of_this_exporters_predecessor"),
    "unreachable": (
        "tests/unit/test_prefix_pulls.py::test_a_holder_that_is_gone_or_has_too_little_costs_nothing_but_the_question"
    ),
    "unwritable": ("tests/unit/test_prefix_tiers.py::test_a_full_disk_is_counted_and_what_it_has_is_still_read"),
    "bad_signature": "tests/unit/test_tickets.py::test_another_key_is_a_bad_signature",
    "buffers_full": "tests/system/test_full_buffers.py::test_whole_answers_that_do_not_fit_are_refused_by_name",
    "canary": (
        "tests/unit/test_canary.py"
        "::test_a_canary_that_does_not_end_in_time_makes_the_worker_unhealthy_and_leaves_nothing"
    ),
    "config": "tests/system/test_bad_input.py::test_wrong_settings_end_a_start_in_one_line",
    "count_mismatch": "tests/contract/test_handoff_refusals.py::test_a_request_that_is_not_the_tickets",
    "damaged": "tests/unit/test_prefix_tiers.py::test_host_memory_that_changed_is_a_miss",
    "differs": "tests/unit/test_canary.py::test_one_wrong_answer_is_asked_again_before_anybody_is_told",
    "disturbed": "tests/unit/test_canary.py::test_who_was_not_alone_proves_nothing",
    "duplicate_request": "tests/unit/test_admission.py::test_a_live_id_is_refused_until_it_is_released",
    "first_token_mismatch": (
        "tests/system/test_migration.py::test_a_target_that_starts_from_another_token_is_not_gone_on_from"
    ),
    "foreign_ticket": "tests/unit/test_tickets.py::test_another_importer_is_foreign_and_so_is_its_successor",
    "layout_mismatch": "tests/contract/test_handoff_refusals.py::test_another_layout_with_both_values",
    "model_refused": "tests/unit/test_build_engine.py::test_a_folder_without_a_model_is_named",
    "no_chat_template": "tests/unit/test_tokenization.py::test_without_a_template_chats_are_a_named_error",
    "no_common_protocol": (
        "tests/contract/test_handoff_versions.py"
        "::test_an_importer_that_names_no_version_is_refused_where_the_first_is_retired"
    ),
    "no_common_transport": "tests/contract/test_handoff_refusals.py::test_no_transport_in_common",
    "no_large_pair": (
        "tests/system/test_unequal_pools.py"
        "::test_a_prompt_that_no_prefill_worker_can_hold_is_prefilled_by_a_decode_worker"
    ),
    "no_tokenizer": "tests/unit/test_validation.py::test_stop_strings_need_a_tokenizer",
    "prompt_mismatch": "tests/contract/test_handoff_refusals.py::test_a_request_that_is_not_the_tickets",
    "prompt_too_long": "tests/unit/test_validation.py::test_a_prompt_too_long_is_told_both_numbers",
    "queue_full": "tests/system/test_failover.py::test_a_full_or_leaving_prefill_worker_is_passed_over",
    "replayed_ticket": "tests/unit/test_leases.py::test_attempt_attaches_once",
    "resume_superseded": "tests/unit/test_live_streams.py::test_only_a_call_of_a_higher_number_takes_a_stream_over",
    "slow_client": "tests/unit/test_outbox.py::test_past_the_cap_the_slowest_client_is_given_up_and_only_that_one",
    "timeout": "tests/system/test_migration.py::test_a_target_that_does_not_begin_in_time_is_given_up_and_told",
    "unauthenticated": "tests/unit/test_serving.py::test_an_interceptor_may_refuse_like_a_service",
    "unknown_model": "tests/unit/openai_api/test_refusals.py::test_an_unknown_model_is_not_found",
    "unreadable": "tests/unit/test_prefix_tiers.py::test_a_folder_that_vanishes_is_a_miss_and_prompts_go_on",
    "unsupported_field": (
        "tests/unit/openai_api/test_refusals.py::test_a_field_that_does_nothing_here_is_refused_by_name"
    ),
    "unverifiable": "tests/contract/test_handoff_verify.py::test_who_verifies_refuses_blocks_without_digests",
    "no_worker_large_enough": (
        "tests/system/test_unequal_pools.py"
        "::test_a_request_too_large_for_every_worker_is_refused_at_once_as_the_clusters_fault"
    ),
    "worker_too_small": (
        "tests/system/test_unequal_pools.py"
        "::test_a_worker_that_refuses_for_its_size_costs_no_attempt_and_is_not_asked_again"
    ),
}


def test_every_failure_reason_is_reached_by_a_simulated_schedule_or_by_a_named_test() -> None:
    names = {name for run in json.loads(RESULTS.read_text())["runs"] for name in run["reached"]}
    unreached = {reason for reason in every_reason() - _BASES if not is_reached(reason, names)}
    assert unreached <= REACHED_BY.keys(), (
        f"no kept schedule reached {sorted(unreached - REACHED_BY.keys())}: name a test for each in REACHED_BY"
    )


def test_reasons_are_found_where_they_are_counted() -> None:
    """An error's name, a hand-off's, a literal, a constant, one of another module, and one of two that may be."""
    wanted = {"queue_full", "digest_mismatch", "late", "ticket_reissued", "token_out_of_order", "colocated"}
    assert wanted <= every_reason()


def test_each_named_test_exists_and_speaks_of_its_reason() -> None:
    classes = {kind.reason: kind.__name__ for kind in error_kinds()}
    reasons = every_reason()
    for reason, test in REACHED_BY.items():
        assert reason in reasons, f"{reason} does not exist any more"
        words = (reason, reason.upper(), classes.get(reason, reason))
        source = _source(test)
        assert any(re.search(rf"(?<![a-zA-Z]){word}(?![a-zA-Z])", source) for word in words), f"{test}: {reason}"


def test_every_row_of_the_failover_table_has_its_evidence() -> None:
    assert set(rows()) == EVIDENCE.keys(), "the second cells of docs/failover.md and the keys of EVIDENCE differ"
    assert {row for row, names in EVIDENCE.items() if not names} == ELSEWHERE.keys()
    for path in ELSEWHERE.values():
        assert (_ROOT / path).exists(), path


def _source(test: str) -> str:
    path, _, name = test.partition("::")
    text = (_ROOT / path).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ast.get_source_segment(text, node) or ""
    raise AssertionError(f"{test} does not exist")
