"""The task of the GRPO example: characters, rewards, and what the reader of prompts refuses."""

from pathlib import Path

import pytest
from grpo import task
from grpo.errors import UserError
from grpo.task import Problem

SHIPPED_PROMPTS = Path(task.__file__).parent / "prompts.jsonl"


def read(path):
    return task.read_problems(path, max_prompt_chars=18, max_answer_chars=5)


@pytest.mark.parametrize(
    ("answer", "expected"), [("345.", 1.0), ("345", 0.75), ("349.", 0.75), ("3456.", 0.6), ("345345", 0.5), (".", 0.0)]
)
def test_the_reward_is_the_share_that_is_right_and_only_the_whole_ended_answer_is_exact(answer, expected):
    problem = Problem("234=", "345")
    assert task.reward(problem, answer) == expected
    assert task.is_exact(problem, answer) == (expected == 1.0)


def test_the_shipped_prompts_are_right_distinct_and_vary_in_length():
    problems = read(SHIPPED_PROMPTS)
    assert len({problem.prompt for problem in problems}) == len(problems) >= 500
    for problem in problems:
        digits = problem.prompt.removesuffix("=")
        assert problem.answer == "".join(str((int(digit) + 1) % 10) for digit in digits)
    assert {len(problem.prompt) for problem in problems} == {2, 3, 4, 5}


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
def test_a_broken_line_is_named_with_its_file_and_number(tmp_path, line, why):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "3+4=", "answer": "7"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=rf"prompts\.jsonl, line 3: {why}"):
        read(path)


def test_held_out_prompts_are_not_trained_on():
    problems = [Problem(f"{i}+0=", str(i)) for i in range(103)]
    train, held_out = task.split_problems(problems, 20)
    assert len(held_out) == 20
    assert len(train) == 83
    assert set(train) | set(held_out) == set(problems)
