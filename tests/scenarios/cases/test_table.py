"""Every fault that was seen in the field on servers of this kind has its scenario; this is the list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

CASES = {
    1: "test_case_01_tokens_of_a_tool_call_that_the_parser_hides_are_all_recorded",
    2: "test_case_02_an_answer_without_ids_is_never_recorded_and_the_agent_gets_one_from_elsewhere",
    3: "test_case_03_a_stream_holds_nothing_but_the_dialect_s_own_events",
    4: "test_case_04_06_an_aborted_segment_neither_loses_nor_repeats_a_token",
    6: "test_case_04_06_an_aborted_segment_neither_loses_nor_repeats_a_token",
    8: "test_case_08_39_a_chunk_with_broken_logprobs_is_never_recorded_and_the_agent_does_not_notice",
    9: "test_case_09_10_60_when_the_client_goes_the_engine_is_freed_and_the_tokens_stay",
    10: "test_case_09_10_60_when_the_client_goes_the_engine_is_freed_and_the_tokens_stay",
    11: "test_case_11_a_continued_request_has_the_rest_of_its_budget_only",
    14: "test_case_14_of_two_answers_to_the_same_request_the_one_that_was_used_counts",
    15: "test_case_15_the_same_body_without_the_retry_header_is_two_generations",
    16: "test_case_15_16_a_retry_attaches_to_the_running_generation",
    17: "test_case_17_18_an_anthropic_call_alone_is_block_0_and_its_arguments_come_in_a_delta",
    18: "test_case_17_18_an_anthropic_call_alone_is_block_0_and_its_arguments_come_in_a_delta",
    21: "test_case_75_21_every_chunk_has_a_null_finish_reason_until_the_last_and_usage_comes_only_when_asked",
    22: "test_case_22_arguments_are_the_exact_text_of_the_model",
    23: "test_case_23_a_tool_without_arguments_is_called_with_an_empty_object",
    25: "test_case_25_49_parallel_calls_keep_their_indexes_and_arguments",
    26: "test_case_26_a_character_split_over_tokens_reaches_the_agent_whole",
    27: "test_case_27_null_empty_and_missing_content_are_the_same_answer",
    30: "test_case_30_a_prompt_that_does_not_fit_is_told_in_openai_s_words_and_is_no_turn",
    31: "test_case_31_the_template_s_history_branches_where_its_tokens_are_others",
    32: "test_case_32_reasoning_whose_opening_was_in_the_prompt_is_never_wrapped_again",
    34: "test_case_34_40_the_same_text_in_other_ids_is_another_path",
    35: "test_case_35_a_special_token_within_an_answer_is_kept_and_compared_by_its_id",
    36: "test_case_36_the_engine_s_ids_say_how_long_an_answer_is",
    37: "test_case_37_a_template_that_cannot_be_continued_renders_in_full_and_says_so",
    38: "test_case_38_a_failure_ends_one_trajectory_and_not_the_others",
    39: "test_case_08_39_a_chunk_with_broken_logprobs_is_never_recorded_and_the_agent_does_not_notice",
    40: "test_case_34_40_the_same_text_in_other_ids_is_another_path",
    41: "test_case_41_each_choice_has_the_versions_of_its_own_tokens",
    42: "test_case_42_every_request_is_salted_with_the_version_of_its_route",
    43: "test_case_43_versions_are_per_token_when_weights_change_under_a_generation",
    44: "test_case_44_a_billing_header_that_changes_reaches_neither_the_prompt_nor_the_match",
    47: "test_case_47_tokens_that_an_engine_wrote_past_the_stop_string_are_not_the_answer_s",
    49: "test_case_49_the_finish_reason_is_the_same_in_both_modes",
    51: "test_case_51_an_answer_with_a_call_is_gone_on_from_by_its_id_and_nothing_forks",
    52: "test_case_52_no_gateway_is_part_of_the_proxy",
    53: "test_case_53_a_training_session_without_a_single_token_is_told_loudly",
    54: "test_case_01_54_the_count_that_is_told_is_that_of_the_recorded_tokens",
    56: "test_case_56_logprobs_of_a_stream_are_those_of_the_whole_answer",
    57: "test_case_57_log_probabilities_are_the_engine_s_in_the_schema_of_completions",
    59: "test_case_59_special_tokens_are_recorded_but_not_shown",
    60: "test_case_09_10_60_when_the_client_goes_the_engine_is_freed_and_the_tokens_stay",
    62: "test_case_62_a_second_turn_keeps_its_calls_its_format_and_its_limit",
    63: "test_case_63_an_answer_that_the_client_left_is_not_extended",
    65: "test_case_26_65_a_cut_within_a_character_does_not_harm_it",
    66: "test_case_66_headers_of_the_engine_are_not_echoed",
    68: "test_case_68_an_empty_generation_is_no_parent_of_its_repetition",
    70: "test_case_70_two_leaves_share_their_first_turn_and_count_it_once",
    71: "test_case_71_72_what_the_agent_asked_and_what_was_used_are_both_recorded_and_logprobs_are_not_rescaled",
    72: "test_case_71_72_what_the_agent_asked_and_what_was_used_are_both_recorded_and_logprobs_are_not_rescaled",
    73: "test_case_73_a_greedy_turn_is_marked_and_keeps_the_engine_s_log_probs",
    75: "test_case_75_21_every_chunk_has_a_null_finish_reason_until_the_last_and_usage_comes_only_when_asked",
    76: "test_case_76_a_count_is_the_length_of_the_prompt_that_a_call_records_and_leaves_nothing",
    77: "test_case_77_tool_content_as_parts_or_as_text_gives_the_same_ids",
    78: "test_case_78_the_token_limit_is_the_smaller_one_asked_or_the_room_that_is_left",
    80: "test_case_80_reasoning_sent_back_under_either_name_or_not_reaches_the_same_node",
    82: "test_case_82_a_client_that_stores_nothing_and_sends_all_items_again_reaches_the_same_place",
    86: "test_case_86_three_hundred_requests_held_through_a_weight_update_all_complete_once",
    87: "test_case_87_two_conversations_interleaved_in_one_session_are_two_paths",
    90: "test_case_90_the_attempt_is_part_of_a_session_s_identity_and_a_released_one_is_sealed",
}
"""Number of the case -> the scenario that shows it best; others may carry its number too."""

SCENARIOS = Path(__file__).resolve().parents[1]


def written() -> dict[str, set[int]]:
    """Name of each numbered scenario -> its numbers."""
    found = {}
    for file in SCENARIOS.rglob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            numbers = re.match(r"test_case_((?:\d\d_)+)", getattr(node, "name", ""))
            if numbers:
                found[node.name] = {int(number) for number in numbers[1].strip("_").split("_")}
    return found


def test_every_case_has_its_scenario() -> None:
    scenarios = written()
    missing = {number: name for number, name in CASES.items() if number not in scenarios.get(name, ())}
    assert missing == {}


def test_every_numbered_scenario_is_of_a_case() -> None:
    assert {number for numbers in written().values() for number in numbers} == set(CASES)
