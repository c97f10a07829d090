"""Sinks, the console, rollout tables and curves."""

import importlib.util
import io
import json
import os
import pty
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyarrow.parquet import read_table
from rich.console import Console

from dapo.core.errors import ConfigError, DataError
from dapo.core.text import excerpt
from dapo.runs.console import (
    ProgressDisplay,
    duration,
    evaluation_line,
    final_report,
    printable,
    progress,
    sparkline,
    step_line,
    stopwatch,
)
from dapo.runs.curves import curves_figure, plain_text, plot_curves, reliability
from dapo.runs.metric_table import metric_of
from dapo.runs.metrics_file import JsonlSink, read_metrics, truncate_after
from dapo.runs.rollout_table import (
    OPTIONAL_COLUMNS,
    ROLLOUT_SCHEMA,
    episode_json,
    episode_of,
    short_fields,
    write_rollouts,
)
from dapo.runs.sinks import TensorBoardSink, TrackioSink, WandbSink
from dapo.types import Episode, Generation
from helpers.run_files import append_bytes, log_metrics
from helpers.tables import for_each_row

STEP = {
    "reward/mean": -0.632,
    "reward/accuracy": 0.234,
    "rollout/keep_rate": 0.8,
    "rollout/response_tokens_mean": 18.2,
    "rollout/truncated_fraction": 0.03,
    "loss/entropy": 0.84,
    "time/tokens_per_s": 534.1,
    "time/step_s": 11.2,
}


class TestMetricsFile:
    def test_a_line_is_there_as_soon_as_it_is_logged_with_keys_in_the_order_given(self, tmp_path):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.log(12, {"reward/mean": 0.5, "loss/entropy": 1, "a/b": 2.0})
        assert (
            tmp_path / "metrics.jsonl"
        ).read_text() == '{"step": 12, "reward/mean": 0.5, "loss/entropy": 1, "a/b": 2.0}\n'
        sink.close()

    def test_numbers_that_are_not_finite_are_null(self, tmp_path):
        sink = JsonlSink(tmp_path / "metrics.jsonl")
        sink.log(1, {"a/nan": float("nan"), "a/inf": float("inf"), "a/x": -0.5})
        sink.close()
        assert read_metrics(tmp_path / "metrics.jsonl") == [
            {"step": 1, "a/nan": None, "a/inf": None, "a/x": -0.5}
        ]

    def test_reopening_appends(self, tmp_path):
        for step in (1, 2):
            sink = JsonlSink(tmp_path / "metrics.jsonl")
            sink.log(step, {})
            sink.close()
        assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]

    def test_truncate_cuts_later_steps_and_a_torn_line_and_leaves_the_others_byte_for_byte(
        self, tmp_path
    ):
        path = tmp_path / "metrics.jsonl"
        kept = b'{"step": 0,   "eval/x/accuracy": 0.10}\n{"step": 2, "a/b": 1e-06}\n'
        append_bytes(path, kept + b'{"step": 3, "a/b": 2}\n{"step": 4, "a')
        truncate_after(path, 2)
        assert path.read_bytes() == kept
        assert list(tmp_path.iterdir()) == [path]

    def test_truncating_a_missing_file_leaves_it_missing(self, tmp_path):
        truncate_after(tmp_path / "metrics.jsonl", 3)
        assert list(tmp_path.iterdir()) == []

    def test_a_line_still_being_written_is_not_read(self, tmp_path):
        log_metrics(tmp_path / "metrics.jsonl", [{"step": 1}])
        append_bytes(tmp_path / "metrics.jsonl", b'{"step": 2')
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]

    def test_a_spoilt_line_is_named_and_nothing_is_cut(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        log_metrics(path, [{"step": 1}])
        append_bytes(path, b"hello\n")
        log_metrics(path, [{"step": 2}])
        with pytest.raises(
            DataError,
            match=r"metrics.jsonl, line 2: expected an object with a \"step\", got b'hello",
        ):
            truncate_after(path, 1)
        assert path.read_text() == '{"step": 1}\nhello\n{"step": 2}\n'

    def test_a_missing_metrics_file_is_named(self, tmp_path):
        with pytest.raises(DataError, match=r"no metrics file .*nowhere\.jsonl"):
            read_metrics(tmp_path / "nowhere.jsonl")


class TestTrackers:
    def test_tensorboard_reads_back_what_was_logged(self, tmp_path):
        sink = TensorBoardSink(tmp_path)
        sink.log(1, {"reward/mean": 0.25, "rollout/groups": 8})
        sink.log(2, {"reward/mean": 0.75})
        sink.close()
        assert _tensorboard_scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.75)]
        assert _tensorboard_scalars(tmp_path, "rollout/groups") == [(1, 8.0)]

    def test_a_resumed_run_hides_what_was_logged_after_its_checkpoint(self, tmp_path):
        first = TensorBoardSink(tmp_path)
        for step in (1, 2, 3):
            first.log(step, {"reward/mean": float(step)})
        first.close()
        resumed = TensorBoardSink(tmp_path, first_step=2)
        resumed.log(2, {"reward/mean": 20.0})
        resumed.close()
        assert _tensorboard_scalars(tmp_path, "reward/mean") == [(1, 1.0), (2, 20.0)]

    @pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
    def test_wandb_that_is_not_installed_says_how_to_install_it(self, tmp_path):
        with pytest.raises(ConfigError) as error:
            WandbSink("dapo", "run", {}, tmp_path)
        assert (
            str(error.value)
            == "log.sinks needs the package wandb, which is not installed: pip install wandb"
        )

    @pytest.mark.skipif(
        importlib.util.find_spec("trackio") is not None, reason="trackio is installed"
    )
    def test_trackio_that_is_not_installed_says_how_to_install_it(self):
        with pytest.raises(ConfigError, match=r"pip install trackio"):
            TrackioSink("dapo", "run", {})


class TestPlainProgress:
    def test_a_step_is_one_line(self):
        assert (
            step_line(3, 300, STEP, seconds_left=480.0)
            == "step   3/300  reward -0.632  accuracy  23.4%  kept  80.0%  length    18.2 "
            " truncated   3.0%  entropy 0.840    534 tok/s    11.2 s  left     8m"
        )

    def test_columns_stay_where_they_are_whatever_the_numbers(self):
        large = {
            **STEP,
            "reward/mean": 0.9,
            "reward/accuracy": 1.0,
            "rollout/response_tokens_mean": 20480.0,
            "time/tokens_per_s": 99999.0,
            "time/step_s": 9999.9,
        }
        lines = [
            step_line(3, 300, STEP, None),
            step_line(300, 300, large, 86_000.0),
            step_line(12, 300, {"reward/mean": float("nan"), "loss/entropy": None}, 5.0),
        ]
        assert len({len(line) for line in lines}) == 1
        assert lines[2].startswith("step  12/300  reward      -  accuracy     -   kept     - ")

    def test_a_short_batch_is_marked_at_the_end_of_the_line(self):
        assert step_line(3, 300, {**STEP, "rollout/shortfall_groups": 2}, None).endswith(
            "left      -  (2 groups short)"
        )
        assert step_line(3, 300, {**STEP, "rollout/shortfall_groups": 1}, None).endswith(
            "(1 group short)"
        )
        assert step_line(3, 300, {**STEP, "rollout/shortfall_groups": 0}, None).endswith(
            "left      -"
        )

    def test_on_a_narrow_terminal_the_step_line_leaves_out_whole_columns_and_keeps_the_time_left(
        self,
    ):
        whole = step_line(3, 300, STEP, 480.0)
        assert step_line(3, 300, STEP, 480.0, width=len(whole)) == whole
        for width in range(54, len(whole)):
            line = step_line(3, 300, STEP, 480.0, width=width)
            assert len(line) <= width
            assert line.startswith("step   3/300 reward ")
            assert "accuracy" in line
            assert line.endswith("left     8m")
        assert step_line(12, 18, STEP, 480.0, width=80).split()[::2].count("kept") == 1

    def test_an_evaluation_is_logged_with_its_interval(self):
        metrics = {
            "eval/mix/accuracy": 0.5,
            "eval/mix/low": 0.412,
            "eval/mix/high": 0.59,
            "eval/mix/avg@4": 0.5,
            "eval/sums/accuracy": 1.0,
        }
        assert (
            evaluation_line(20, metrics)
            == "step 20: evaluation: mix 50.0% (41.2% to 59.0%), sums 100.0%"
        )
        assert evaluation_line(20, STEP) == ""
        graded = {"eval/mix/accuracy": 6.25, "eval/mix/low": 5.0, "eval/mix/high": 7.5}
        assert (
            evaluation_line(20, graded)
            == "step 20: evaluation: mix mean score 6.250 (5.000 to 7.500)"
        )
        nothing = {"eval/mix/truncated_fraction": 0.0}
        assert evaluation_line(20, nothing) == "step 20: evaluation: mix nothing judged"

    def test_without_a_terminal_there_are_lines_and_nothing_else(self):
        stream = io.StringIO()
        display = ProgressDisplay(4, stream=stream)
        display.log(0, {"eval/mix/accuracy": 0.5})
        display.phase("generate", 3, 8)
        display.log(1, {**STEP, "time/step_s": 100.0})
        display.message("step 2: 3 verifier errors, most often: timed out\x1b[2J")
        display.log(2, {**STEP, "time/step_s": 20.0})
        display.log(3, {**STEP, "time/step_s": 30.0, "eval/mix/accuracy": 0.75})
        display.close()
        lines = stream.getvalue().splitlines()
        assert [line.split("  ")[0] for line in lines] == [
            "step 0: evaluation: mix 50.0%",
            "step 1/4",
            "step 2: 3 verifier errors, most often: timed out\\x1b[2J",
            "step 2/4",
            "step 3/4",
            "step 3: evaluation: mix 75.0%",
        ]
        # medians of (100), (100, 20), (100, 20, 30) seconds times 3, 2, 1 steps
        assert [line[-5:] for line in lines if "left" in line] == ["   5m", "   2m", "  30s"]

    def test_an_evaluation_is_neither_in_the_seconds_of_the_step_nor_forgotten_in_the_time_left(
        self,
    ):
        stream = io.StringIO()
        display = ProgressDisplay(11, stream=stream)
        display.log(
            1, {**STEP, "time/step_s": 30.0, "time/evaluate_s": 20.0, "eval/mix/accuracy": 0.5}
        )
        step, evaluation = stream.getvalue().splitlines()
        assert "10.0 s  left     5m" in step  # (10 + 20) seconds times 10 steps
        assert evaluation == "step 1: evaluation: mix 50.0%, in 20s"

    def test_a_budget_of_tokens_ends_the_time_left_before_the_steps_do(self):
        stream = io.StringIO()
        display = ProgressDisplay(1000, token_budget=1000, stream=stream)
        display.recall([{"eval/mix/accuracy": 0.5}, {"rollout/tokens_generated": 100}])
        display.log(2, {**STEP, "time/step_s": 30.0, "rollout/tokens_generated": 140})
        display.log(3, {**STEP, "time/step_s": 30.0, "rollout/tokens_generated": 660})
        # 240 tokens in 2 steps: 760 more take 7 steps; 900 in 3 steps: 100 more take one
        assert [line[-5:] for line in stream.getvalue().splitlines()] == ["   4m", "  30s"]

    def test_a_clock_is_seen_to_go_on_after_a_minute(self):
        assert [stopwatch(s) for s in (45.2, 60.0, 125.9, 3599.0, 3720.0)] == [
            "45s",
            "1m00s",
            "2m05s",
            "59m59s",
            "1h02m",
        ]

    def test_durations_read_well(self):
        seconds = [0.4, 59.4, 59.6, 3569, 3571, 3600 + 5 * 60, 86_399, 3 * 86_400 + 4 * 3600]
        assert [duration(s) for s in seconds] == [
            "0s",
            "59s",
            "1m",
            "59m",
            "1h00m",
            "1h05m",
            "1d00h",
            "3d04h",
        ]


class TestLiveProgress:
    def test_a_terminal_shows_the_last_step_and_keeps_messages_above(self):
        text = _on_a_terminal(_three_steps)
        text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # colours
        assert "step 1: 2 verifier errors, most often: [red]boom\\x1b[2J[/red]" in text
        assert "step 0: evaluation: mix 50.0%" in text
        last = text[text.rindex("step 3/3") :]
        for figure in ("100%", "30.0% now, 10.0% at first", "▃▆█"):
            assert figure in last
        lines = [
            line for line in text.splitlines() if "reward -0.632" in line and "kept  80.0%" in line
        ]
        assert len(lines) == 3, "every step leaves its line above the display"
        assert "generate" not in last

    def test_a_run_that_ends_before_its_last_step_shows_the_steps_that_it_made_and_no_time_left(
        self,
    ):
        def solved(display):
            display.log(1, {**STEP, "time/step_s": 100.0})
            display.log(2, {**STEP, "time/step_s": 100.0})
            display.phase("generate", 5, 8, "")
            display.close()

        text = re.sub(r"\x1b\[[0-9;]*m", "", _on_a_terminal(solved))
        last = text[text.rindex("step 2/3") :]
        assert "67%" in last
        assert not re.search("left|step 3/3", last)

    def test_the_phase_shows_its_own_count(self):
        def generate(display):
            display.phase("generate", 5, 8, "31 judged: 26 all wrong")

        text = _on_a_terminal(generate, until=b"all wrong")
        assert "5/8 groups" in text
        assert "31 judged: 26 all wrong" in text

    def test_the_curve_of_a_verifier_that_gives_scores_is_of_scores(self):
        def scored(display):
            display.log(0, {"eval/mix/accuracy": 1.5, "eval/mix/score_mean": 1.5})
            for step, score in ((1, 0.25), (2, 1.75)):
                display.log(step, {"reward/score_mean": score, "time/step_s": 1.0})
            display.close()

        text = re.sub(r"\x1b\[[0-9;]*m", "", _on_a_terminal(scored))
        assert re.search(r"score +\S+ +1\.750 now, 0\.250 at first", text)

    def test_the_cursor_is_given_back(self):
        raw = _on_a_terminal(_three_steps)
        assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")

    def test_a_curve_starts_at_zero_and_has_eight_heights(self):
        assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
        assert sparkline([0.1, 0.1, 0.9, 0.9], 2) == "▁█"
        assert sparkline([0.0], 10) == "▁"
        assert sparkline([-1.0, -2.0], 10) == "█▁"
        # mean scores that rise below 0
        assert sparkline([-0.8, -0.4, -0.1, -0.1], 10) == "▁▅██"
        assert len(sparkline([0.5] * 1000, 32)) == 32


class TestUntrustedText:
    def test_control_format_and_direction_characters_are_spelled_out(self):
        assert (
            printable("a\x1b[31m\r\x00\u202eb\u200b\ud800\tc\nd")
            == "a\\x1b[31m\\r\\x00\\u202eb\\u200b\\ud800\tc\nd"
        )

    def test_what_the_terminal_cannot_encode_is_spelled_out(self):
        assert printable("π = 3, ok", "ascii") == "\\u03c0 = 3, ok"

    def test_ordinary_text_is_left_alone(self):
        assert printable("Ответ: 7 ✓ 日本 é 🙂") == "Ответ: 7 ✓ 日本 é 🙂"

    def test_long_text_keeps_its_beginning_and_its_end(self):
        cut = excerpt("S" + "x" * 1998 + "E")
        assert cut.startswith("Sx")
        assert cut.endswith("xE")
        assert "[... 1,200 characters left out ...]" in cut

    def test_many_lines_keep_the_first_and_the_last(self):
        cut = excerpt("\n".join(str(i) for i in range(100))).split("\n")
        assert cut == [
            *"01234567",
            "[... 84 lines left out ...]",
            *(str(i) for i in range(92, 100)),
        ]


class TestFinalReport:
    RESULT = {  # noqa: RUF012
        "accuracy": 0.152,
        "low": 0.12,
        "high": 0.19,
        "problems": 1500,
        "response_tokens_mean": 21.34,
        "truncated_fraction": 0.5,
    }
    SAMPLE = {  # noqa: RUF012
        "question": "What is 7 * 8?",
        "answer": "56",
        "before": "[bold]54\x1b[2J",
        "before_correct": False,
        "after": "56",
        "after_correct": True,
    }

    def report(self, *, encoding="utf-8", **changes):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding)
        values = {
            "before": self.RESULT,
            "after": {**self.RESULT, "accuracy": 0.81},
            "samples": [],
            "files": {},
        }
        final_report(Console(file=stream, width=80), **{**values, **changes})
        stream.flush()
        return raw.getvalue().decode(encoding)

    def test_before_and_after_stand_side_by_side_with_intervals(self):
        rows = [
            [cell.strip() for cell in line.split("│")[1:-1]]
            for line in self.report().splitlines()
            if "│" in line
        ]
        assert rows == [
            ["accuracy", "15.2%", "81.0%"],
            ["95 % interval", "12.0% to 19.0%", "12.0% to 19.0%"],
            ["problems", "1,500", "1,500"],
            ["mean response, tokens", "21.3", "21.3"],
            ["truncated", "50.0%", "50.0%"],
        ]

    def test_a_sentence_is_broken_between_words_and_a_path_or_a_command_never(self):
        path = f"/tmp/{'folder/' * 12}run"
        sentence = " ".join(["weights only, so that the run ends"] * 4)
        files = {"curves": path, "disk space": sentence, "check it": f"dapo doctor {path}"}
        lines = [line.strip() for line in self.report(files=files).splitlines()]
        assert {f"curves      {path}", f"check it    dapo doctor {path}"} <= set(lines)
        assert f"disk space  {sentence}" == " ".join(
            lines[lines.index(f"curves      {path}") + 1 : -1]
        )

    def test_responses_are_shown_as_they_are_and_not_obeyed(self):
        text = self.report(samples=[self.SAMPLE])
        assert "before ✗   [bold]54\\x1b[2J" in text
        assert "after ✓    56" in text
        assert "What is 7 * 8?" in text
        assert "\x1b" not in text

    def test_a_response_without_a_verdict_is_neither_right_nor_wrong(self):
        assert "after ?" in self.report(samples=[{**self.SAMPLE, "after_correct": None}])

    def test_paths_and_commands_are_never_broken_over_lines(self):
        path = "/data/" + "x" * 120 + "/config.yaml"
        assert path in self.report(
            files={"config": Path(path), "evaluate": "dapo eval runs/a --data builtin:sums"}
        )

    def test_without_an_evaluation_there_is_no_table(self):
        assert "accuracy" not in self.report(before=None, after=None)

    def test_a_terminal_that_knows_only_ascii_gets_ascii(self):
        text = self.report(encoding="ascii", samples=[{**self.SAMPLE, "before": "π"}])
        assert re.search(r"before wrong +\\u03c0", text)
        assert "after correct" in text


class TestRollouts:
    def row(self, **changes):
        values = {
            "step": 12,
            "group_id": 7,
            "problem_id": "p7",
            "source": "sums",
            "sample": 3,
            "prompt": "2+2?",
            "response": "4",
            "answer": "4",
            "fields": '{"kind": "sum"}',
            "correct": True,
            "score": 1.0,
            "components": None,
            "error": None,
            "reward": 0.5,
            "advantage": -0.25,
            "prompt_tokens": 5,
            "response_tokens": 2,
            "finish": "stop",
            "outcome": "trained",
            "response_ids": (19, 2),
            "engine_logprobs": (-0.5, -1.25),
            "version": 11,
        }
        return values | changes

    def test_rows_come_back_as_they_were_written(self, tmp_path):
        error_fields = {
            "correct": None,
            "score": None,
            "error": "timed out",
            "reward": None,
            "advantage": None,
        }
        rows = [
            self.row(),
            self.row(**error_fields, response="", response_ids=(), engine_logprobs=()),
        ]
        write_rollouts(tmp_path / "rollouts" / "step_000012.parquet", rows)
        table = read_table(tmp_path / "rollouts" / "step_000012.parquet")
        assert table.schema == ROLLOUT_SCHEMA
        listed = [{**row, "response_ids": list(row["response_ids"])} for row in rows]
        audit = dict.fromkeys(OPTIONAL_COLUMNS)  # null where there was no audit
        assert table.to_pylist() == [
            {**row, "engine_logprobs": list(row["engine_logprobs"])} | audit for row in listed
        ]
        assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000012.parquet"]

    def test_equal_rows_give_equal_bytes(self, tmp_path):
        for name in ("a", "b"):
            write_rollouts(
                tmp_path / name, (self.row(sample=i, response=str(i) * 50) for i in range(300))
            )
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_more_rows_than_one_chunk_keep_their_order(self, tmp_path):
        write_rollouts(tmp_path / "t", (self.row(sample=i) for i in range(2500)))
        assert read_table(tmp_path / "t")["sample"].to_pylist() == list(range(2500))

    def test_no_rows_are_an_empty_table(self, tmp_path):
        write_rollouts(tmp_path / "t", [])
        assert read_table(tmp_path / "t").num_rows == 0

    def test_short_columns_of_a_problem_are_kept_long_ones_and_those_shown_elsewhere_are_not(self):
        short = {"kind": "sum", "level": 3, "extra": {"a": 1}, "note": "x" * 998}
        fields = {**short, "tests": "x" * 999, "solution": "4"}
        assert short_fields(fields, known=["4"]) == json.dumps(short)
        assert short_fields({"solution": "4"}, known=["4"]) is None

    def episode(self, **changes):
        """The value of `episode` for two turns, of which the environment paid one before it
        failed.
        """
        turn = {"role": "assistant", "content": "4"}
        episode = Episode(
            (turn, {"role": "tool", "content": "7"}, turn), (0.5,), error="it broke", tool_calls=1
        )
        generation = Generation(
            "", (1, 2), (0.0, 0.0), "stop", 0, episode=replace(episode, **changes)
        )
        return {"episode": episode_json(generation)}

    def test_an_episode_comes_back_as_it_was_written(self):
        found = episode_of(self.episode())
        assert (found.num_turns, found.rewards, found.error, found.tool_calls) == (
            2,
            [0.5],
            "it broke",
            1,
        )
        assert episode_of({"episode": None}) is episode_of({}) is None

    @for_each_row(
        "changes",
        [
            *(
                {"messages": each}
                for each in (
                    5,
                    "4",
                    [5],
                    [["role"]],
                    [{"role": "user"}],
                    [{"role": 1, "content": ""}],
                )
            ),
            *(
                {"rewards": each}
                for each in ({}, ["1"], [True], [None], [float("nan")], [-float("inf")], [1, 2, 3])
            ),
            *({"tool_calls": each} for each in (-1, 1.5, True, None)),
            {"tool_errors": "1"},
            {"correct": 1},
            {"error": 1},
            {"is_cut": None},
        ],
    )
    def test_an_episode_with_values_that_no_run_writes_is_refused(self, changes):
        with pytest.raises(ValueError, match="a row has no valid episode"):
            episode_of(self.episode(**changes))

    @for_each_row(
        "text", ["", "5", "[]", "{}", "null", '{"messages": []}', "[" * 10**5, "</script>"]
    )
    def test_a_text_that_is_no_episode_is_refused(self, text):
        with pytest.raises(ValueError, match="a row has no valid episode"):
            episode_of({"episode": text})

    def test_a_lone_surrogate_is_replaced_and_a_nul_is_kept(self, tmp_path):
        write_rollouts(tmp_path / "t", [self.row(response="a\ud83db\x00c\ud83d\ude42")])
        assert read_table(tmp_path / "t")["response"].to_pylist() == ["a\ufffdb\x00c🙂"]

    def test_a_row_with_other_columns_is_refused_by_name(self, tmp_path):
        row = self.row(extra=1)
        del row["outcome"]
        with pytest.raises(ValueError, match=r"these differ: \['extra', 'outcome'\]"):
            write_rollouts(tmp_path / "t", [row])

    def test_an_interrupted_write_leaves_the_old_table_and_nothing_else(self, tmp_path):
        def interrupted():
            yield self.row(sample=1)
            raise KeyboardInterrupt

        write_rollouts(tmp_path / "t", [self.row(sample=0)])
        with pytest.raises(KeyboardInterrupt):
            write_rollouts(tmp_path / "t", interrupted())
        assert read_table(tmp_path / "t")["sample"].to_pylist() == [0]
        assert [path.name for path in tmp_path.iterdir()] == ["t"]


class TestCurves:
    def metrics(self, path, steps, **changes):
        lines = [{"step": 0, "eval/mix/accuracy": 0.1, "eval/mix/low": 0.05, "eval/mix/high": 0.15}]
        lines += [
            {"step": step, **STEP, "loss/entropy": None if step == 2 else 0.5}
            for step in range(1, steps + 1)
        ]
        path.write_text("".join(json.dumps({**line, **changes}) + "\n" for line in lines))
        return path

    def test_an_evaluation_stands_out_in_its_own_colour(self, tmp_path):
        steps = '{"step": 1, "reward/accuracy": 0.1}\n{"step": 30, "reward/accuracy": 0.5}\n'
        evaluations = (
            '{"step": 1, "eval/mix/accuracy": 0.2}\n{"step": 30, "eval/mix/accuracy": 0.6}\n'
        )
        shares = []
        for name, text in (("without", steps), ("with", steps + evaluations)):
            (tmp_path / "m").write_text(text)
            plot_curves(tmp_path / "m", tmp_path / f"{name}.png")
            shares.append(_share_of_orange(tmp_path / f"{name}.png"))
        assert shares[1] > shares[0] + 0.0005
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "with.png", "without.png"]

    def test_no_line_touches_the_frame_and_no_legend_covers_data(self, tmp_path):
        ends = {
            "reward/accuracy": (0.0, 1.0),
            "rollout/keep_rate": (1.0, 0.0),
            "rollout/all_correct_fraction": (0.0, 0.0),
            "rollout/all_wrong_fraction": (0.0, 1.0),
            "rollout/response_tokens_mean": (64.0, 64.0),
            "rollout/truncated_fraction": (1.0, 0.0),
            "loss/entropy": (4.079, 4.074),
        }
        rows = [{"step": i + 1, **{name: v[i] for name, v in ends.items()}} for i in range(2)]
        (tmp_path / "m").write_text("".join(json.dumps(row) + "\n" for row in rows))
        figure = curves_figure(tmp_path / "m")
        figure.canvas.draw()
        picture = np.asarray(figure.canvas.buffer_rgba())[::-1, :, :3].astype(int)
        colourful = picture.max(axis=2) - picture.min(axis=2) > 60
        for axes in figure.axes:
            box = axes.get_window_extent()
            left, right = round(box.x0), round(box.x1)
            for end in (round(box.y0), round(box.y1)):
                assert not colourful[end - 2 : end + 3, left:right].any(), axes.get_title(
                    loc="left"
                )
            legend = axes.get_legend()
            assert legend is None or legend.get_window_extent().y0 >= box.y1
        entropy = figure.axes[2]
        span = np.ptp(entropy.get_ylim())
        assert (4.079 - 4.074) / span < 0.01, "a small change is drawn as small"

    def test_names_are_not_read_as_formulas(self, tmp_path):
        plot_curves(
            self.metrics(tmp_path / "m", 20), tmp_path / "curves.png", title=r"model $\nonsense$"
        )
        assert (tmp_path / "curves.png").stat().st_size > 0

    @pytest.mark.parametrize("name", ["数学-run 😀", "тест ñ ß", "a\u200bb\ufe0f🧑‍🚀", "العربية"])
    def test_a_name_whose_characters_no_font_has_is_drawn_escaped_without_a_warning(
        self, tmp_path, name
    ):
        text = self.metrics(tmp_path / "m", 3).read_text()
        renamed = tmp_path / "renamed"
        renamed.write_text(text.replace("eval/mix/", json.dumps(f"eval/{name}/")[1:-1]))
        plot_curves(renamed, tmp_path / "curves.png", title=name)  # a warning is an error
        assert plain_text("тест ß $x$") == r"тест ß \$x\$"
        assert plain_text("数") == "\\u6570"

    @pytest.mark.parametrize(
        "scores", [{"score_mean": 0.667, "low": 0.2, "high": 0.9}, {"low": -0.417, "high": 1.751}]
    )
    def test_the_evaluation_of_a_graded_reward_is_a_mean_score(self, tmp_path, scores):
        evaluation = {
            f"eval/held_out/{key}": value for key, value in ({"accuracy": 0.667} | scores).items()
        }
        (tmp_path / "m").write_text(json.dumps({"step": 0, **evaluation}) + "\n")
        axes = curves_figure(tmp_path / "m").axes[0]
        assert (axes.get_title(loc="left"), axes.get_ylabel()) == (
            "Score",
            "mean score of the verifier",
        )
        assert axes.lines[-1].get_ydata().tolist() == [0.667]
        line = evaluation_line(0, evaluation)
        assert line.startswith(
            f"step 0: evaluation: held_out mean score 0.667 ({scores['low']:.3f} to "
        )
        assert "%" not in line

    def test_a_single_step_whose_interval_just_misses_its_mean_is_plotted(self, tmp_path):
        plot_curves(
            self.metrics(tmp_path / "m", 1, **{"eval/mix/low": 0.1000001}), tmp_path / "curves.png"
        )

    def test_with_predictions_there_are_panels_of_skipped_problems_and_of_calibration(
        self, tmp_path
    ):
        from matplotlib.image import imread

        rows = [
            {
                "rollout/calibration_groups_0_20": 3,
                "rollout/calibration_chance_0_20": 0.3,
                "rollout/calibration_signals_0_20": 1,
            },
            {"rollout/calibration_groups_80_100": 2, "rollout/calibration_chance_80_100": 1.8},
            {
                "rollout/calibration_groups_0_20": 1,
                "rollout/calibration_chance_0_20": 0.1,
                "rollout/calibration_signals_0_20": 0,
            },
        ]
        rows[1]["rollout/calibration_signals_80_100"] = 2
        assert reliability(rows) == [(pytest.approx(0.1), 0.25, 4), (0.9, 1.0, 2)]
        plain = self.metrics(tmp_path / "m", 3)
        plot_curves(plain, tmp_path / "plain.png")
        steps = [
            {"step": i + 1, **STEP, "rollout/problems_skipped": 7, **row}
            for i, row in enumerate(rows)
        ]
        (tmp_path / "m").write_text("".join(json.dumps(row) + "\n" for row in steps))
        plot_curves(tmp_path / "m", tmp_path / "predicted.png")
        shapes = [imread(tmp_path / f"{name}.png").shape for name in ("plain", "predicted")]
        assert shapes[1][1] > shapes[0][1]
        assert shapes[1][0] == shapes[0][0]
        assert [metric_of(name).unit for name in rows[0]] == ["groups"] * 3

    @pytest.mark.parametrize("steps", [12, 40])  # raw, and smoothed
    def test_a_step_without_a_value_is_a_gap_and_the_steps_between_evaluations_are_none(
        self, tmp_path, steps
    ):
        length = "rollout/response_tokens_mean"
        of_data = "eval/mix"
        rows = [{"step": step, **STEP, length: float(step)} for step in range(1, steps + 1)]
        rows[4][length] = float("nan")
        del rows[6][length]
        del rows[8]  # a line that was removed
        for step, accuracy in ((0, 0.25), (4, None), (8, 0.5), (12, 0.75)):
            found = (
                {}
                if accuracy is None
                else {f"{of_data}/accuracy": accuracy, f"{of_data}/high": 1.0}
            )
            rows.append({"step": step, f"{of_data}/truncated_fraction": 0.0, **found})
        log_metrics(tmp_path / "m", sorted(rows, key=lambda row: row["step"]))
        accuracy, lengths, *_ = curves_figure(tmp_path / "m").axes
        for line in lengths.lines:
            x, y = line.get_data()
            assert x.tolist() == list(range(1, steps + 1))
            assert x[np.isnan(y)].tolist() == [5, 7, 9]
        # steps 6 and 8 have a gap on either side
        assert lengths.lines[-1].get_markevery() == [5, 7]
        (evaluated,) = (
            line for line in accuracy.lines if line.get_label().startswith("held out: mix")
        )
        assert evaluated.get_xdata().tolist() == [0, 4, 8, 12]
        assert np.isnan(evaluated.get_ydata()).tolist() == [False, True, False, False]

    def test_a_run_without_steps_has_no_curves(self, tmp_path):
        (tmp_path / "m").write_text("")
        with pytest.raises(DataError, match="m holds no steps yet"):
            plot_curves(tmp_path / "m", tmp_path / "curves.png")


def _tensorboard_scalars(directory, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def _share_of_orange(path):
    import numpy as np
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    return float((np.abs(pixels - np.array([0xEA, 0x58, 0x0C]) / 255).max(axis=-1) < 0.02).mean())


def _three_steps(display):
    display.log(0, {"eval/mix/accuracy": 0.5})
    display.phase("generate", 5, 8)
    display.message("step 1: 2 verifier errors, most often: [red]boom\x1b[2J[/red]")
    for step in (1, 2, 3):
        display.log(step, {**STEP, "reward/accuracy": 0.1 * step})


def _on_a_terminal(use, until=b""):
    """What a terminal receives; `until` is awaited before the display is closed."""
    controller, terminal = pty.openpty()
    received = bytearray()

    def read():
        while not received.endswith(b"\x1b[?25h"):  # the last thing: the cursor is shown again
            received.extend(os.read(controller, 65536))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(terminal, "w", encoding="utf-8") as stream:
        display = ProgressDisplay(3, stream=stream)
        use(display)
        while until not in received:
            time.sleep(0.01)
        display.close()
        display.close()
        reader.join()
    os.close(controller)
    return received.decode()


@pytest.mark.parametrize(("seconds", "lines"), [(10.0, 1), (0.0, 10)])
def test_a_log_file_gets_a_line_at_the_end_and_at_most_ten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: float, lines: int
):
    monkeypatch.setattr("dapo.runs.console.LOG_S", seconds)
    with progress("evaluate m") as report:
        for done in range(101):
            report(done, 100)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == lines
    assert printed[-1].startswith("evaluate m: 100/100 problems")


def test_progress_goes_to_standard_output_by_default(capsys):
    assert not sys.stdout.isatty()
    ProgressDisplay(3).message("hello")
    assert capsys.readouterr().out == "hello\n"
