#!/usr/bin/env python3
"""Checks that the GPU tests on the emulated device see faults: each of the list must turn its test red, and without a fault it must be green.

  python3 tools/emulated_faults.py --library DIR --tests BINARY

DIR is what `tools/emulated_device.py --faults` printed, BINARY the test binary `gpu` of canopy-kernels. Exit code 1 where a fault stays green.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

FAULT_HEADER = pathlib.Path(__file__).resolve().parent.parent / "canopy-kernels/include/canopy/fault.cuh"
CASES = {
    "accept_walk::walks_equal_those_on_the_cpu": ["missed_node", "off_by_one"],
    "drafted_tokens::lists_are_filled_in_place": ["off_by_one"],
    "gates::forward_equals_the_oracle": ["early_branch", "gap", "overrun"],
    "gdn_prefill::infinite_log_gates_forget_everything": ["dropped_slice", "gap", "overrun"],
    "glue::gates_equal_the_oracle": ["gap", "overrun"],
    "glue::kv_append_writes_its_rows_and_no_other": ["off_by_one"],
    "glue::nonfinite_rows_stay_alone": ["swallow"],
    "glue::rope_equals_the_oracle_to_position_262144": ["off_by_one", "gap"],
    "int8::a_group_without_a_scale_is_nan_and_no_other_output": ["row_order"],
    "int8::a_nan_stays_in_its_row": ["swallow"],
    "kv_compact::rows_move_in_every_pool_as_if_gathered_from_a_copy": ["missed_node", "off_by_one"],
    "linear::a_nan_stays_in_its_row": ["swallow"],
    "top_tokens::equal_logits_rank_by_token": ["off_by_one", "dropped_slice"],
    "tree_attention::padding_is_zero_and_a_wrong_length_is_nan": ["overrun"],
    "tree_attention::sums_over_2100_equal_keys_are_f32": ["dropped_slice", "short_path"],
    "tree_build::lists_are_those_of_the_cpu": ["short_path", "row_order", "swallow", "missed_node", "off_by_one", "dropped_slice"],
    "tree_conv::verify_and_commit_equal_the_oracle": ["missed_node", "row_order", "gap", "overrun", "half_sum"],
    "tree_gdn::a_nan_reaches_descendants_only": ["leak"],
    "tree_gdn::a_nan_reaches_descendants_only_under_every_solve": ["short_path"],
    "tree_gdn::blocked_a_nan_reaches_descendants_only": ["leak"],
    "tree_gdn::blocked_infinite_log_gates_forget_everything": ["short_path", "dropped_slice", "gap", "overrun"],
    "tree_gdn::fused_a_nan_reaches_descendants_only": ["leak"],
    "tree_gdn::fused_commit_equals_the_oracle": ["missed_node", "half_sum"],
    "tree_gdn::fused_infinite_log_gates_forget_everything": ["short_path", "dropped_slice", "gap", "overrun"],
    "tree_gdn::verify_equals_the_oracle_on_branching_trees": ["short_path", "gap", "overrun"],
    "tree_gdn_serial::infinite_log_gates_forget_everything": ["stale", "row_order", "gap", "overrun"],
    "tree_gdn_serial::every_node_can_be_committed": ["missed_node"],
}


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--library", required=True)
    ap.add_argument("--tests", required=True)
    ap.add_argument("--jobs", type=int, default=os.cpu_count())
    args = ap.parse_args()
    body = re.search(r"enum class Fault : int \{(.*?)\};", FAULT_HEADER.read_text(), re.S)[1]
    numbers = {name: number for number, name in enumerate(re.findall(r"^\s*(\w+),", body, re.M))}

    def green(test, fault):
        environment = dict(os.environ, LD_LIBRARY_PATH=args.library, CANOPY_REQUIRE_GPU="1", CANOPY_EMULATED_FAULT=str(numbers[fault]))
        done = subprocess.run([args.tests, "--exact", test], env=environment, capture_output=True, text=True)
        return done.returncode == 0 and "1 passed" in done.stdout

    cases = [(test, fault) for test, faults in CASES.items() for fault in ["none", *faults]]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda case: green(*case), cases))
    wrong = [case for case, passed in zip(cases, results) if passed != (case[1] == "none")]
    for test, fault in wrong:
        print(f"{test}: {'red without a fault' if fault == 'none' else fault + ' stays green'}")
    print(f"SUMMARY {sum(fault != 'none' for _, fault in cases)} faults in {len(CASES)} tests, {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
