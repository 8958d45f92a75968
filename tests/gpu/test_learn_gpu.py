"""The attention ladder against its bars."""

import json

from tilewright.learn.command import learn_command


def test_every_step_is_right_the_trap_is_one_and_the_last_is_as_fast_as_the_op(tmp_path, gpu):
    file = tmp_path / "steps.jsonl"
    assert learn_command("attention", seq_lens=[2048], json_file=file) == 0
    rows = {row["case"].rpartition("step=")[2]: row for row in map(json.loads, file.read_text().splitlines())}
    assert rows["the trap"]["time_us"] > rows["fast division"]["time_us"]
    assert rows["tuned"]["peers"]["ops.attention"] > 0.97
