"""The task of the GRPO example: characters, rewards, and what the reader of prompts refuses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from grpo import task
from grpo.errors import UserError
from grpo.task import Answer, Problem

SHIPPED_PROMPTS = Path(task.__file__).parent / "prompts.jsonl"


def read(path: Path) -> list[Problem]:
    return task.read_problems(path, max_prompt_chars=18, max_answer_chars=5)


def test_decode_undoes_encode_and_stops_at_end_of_sequence() -> None:
    ids = task.encode("12+7=19")
    assert min(ids) > task.EOS_ID
    assert max(ids) < task.VOCAB_SIZE
    assert task.decode([*ids, task.EOS_ID, *task.encode("55")]) == Answer("12+7=19", finished=True)
    assert task.decode(ids) == Answer("12+7=19", finished=False)
    assert task.decode([task.PAD_ID, task.EOS_ID]) == Answer("?", finished=True)


def test_encode_names_the_character_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="character '-'"):
        task.encode("12-7=")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer("19", finished=True), 1.0),
        (Answer("19", finished=False), 0.0),
        (Answer("19=", finished=True), 0.0),
        (Answer("019", finished=True), 0.0),
        (Answer("", finished=True), 0.0),
    ],
)
def test_only_the_exact_finished_answer_is_rewarded(answer: Answer, expected: float) -> None:
    assert task.reward(Problem("12+7=", "19"), answer) == expected


def test_corruption_changes_exactly_one_digit() -> None:
    rng = random.Random(0)
    for answer in ["7", "19", "1234"] * 50:
        wrong = task.corrupt_one_digit(rng, answer)
        assert len(wrong) == len(answer)
        assert sum(a != b for a, b in zip(wrong, answer, strict=True)) == 1


def test_the_shipped_prompts_are_right_distinct_and_vary_in_length() -> None:
    problems = read(SHIPPED_PROMPTS)
    assert len(problems) >= 500
    assert len({problem.prompt for problem in problems}) == len(problems)
    for problem in problems:
        a, b = problem.prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(problem.answer)
    assert {len(problem.prompt) for problem in problems} == {4, 5, 6, 7, 8}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl does not exist"):
        read(tmp_path / "nowhere.jsonl")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"empty\.jsonl is empty"):
        read(path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.jsonl cannot be read"):
        read(path)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "1+1=", "answer": "2"', "not a JSON object"),
        ('["1+1=", "2"]', "expected a JSON object, got list"),
        ('{"prompt": "1+1=", "anser": "2"}', "the key 'answer' is missing; the line has .'anser', 'prompt'."),
        ('{"prompt": "1+1=", "answer": 2}', "'answer' must be a string that is not empty, got 2"),
        ('{"prompt": "", "answer": "2"}', "'prompt' must be a string that is not empty"),
        ('{"prompt": "1*1=", "answer": "1"}', "'prompt' is '1.1=': character '.' is not one of"),
        ('{"prompt": "1+1=", "answer": "123456"}', "'answer' has 6 characters, the model has room for 5"),
        ('{"prompt": "1111111111+11111111=", "answer": "1"}', "'prompt' has 20 characters, the model has room for 18"),
    ],
)
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "3+4=", "answer": "7"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=rf"prompts\.jsonl, line 3: {why}"):
        read(path)


def test_held_out_prompts_are_not_trained_on() -> None:
    problems = [Problem(f"{i}+0=", str(i)) for i in range(103)]
    train, held_out = task.split_problems(problems, 20)
    assert len(held_out) == 20
    assert len(train) == 83
    assert set(train) | set(held_out) == set(problems)


def test_a_handful_of_prompts_is_trained_and_evaluated_on() -> None:
    problems = [Problem(f"{i}+0=", str(i)) for i in range(4)]
    assert task.split_problems(problems, 128) == (problems, problems)
