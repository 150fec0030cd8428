"""The problems of the claim about reasoning: solutions hold, none is missing, none is both learned and held out."""

import itertools

import pytest

from pippin.claims.worlds.sequences import countdown as arithmetic


def brute_force(numbers, target):
    found = set()
    for x, y, z in itertools.permutations(numbers):
        for first, second in itertools.product("+-", repeat=2):
            text = f"{x}{first}{y}{second}{z}"
            if eval(f"{x}{first}{y}") >= 0 and eval(text) == target:
                found.add(text)
    return found


@pytest.mark.parametrize(("numbers", "target"), [((3, 8, 5), 6), ((7, 7, 7), 7), ((1, 2, 9), 3), ((4, 4, 1), 9)])
def test_solutions_are_those_of_brute_force(numbers, target):
    found = arithmetic.solutions(numbers, target)
    assert {answer for *_, answer in found} == brute_force(numbers, target)
    assert len(found) == len(set(found))
    question = f"{','.join(map(str, numbers))}={target}"
    for first, second, answer in found:
        assert arithmetic.is_solution(question, answer)
        for step in (first, second):
            left, right = step.split("=")
            assert eval(left) == int(right)


@pytest.mark.parametrize("answer", ["3+8", "3+8-5+0", "8+8-5", "3-5+8", "", "a+b-c", "3+8-5=6"])
def test_wrong_answers_are_wrong(answer):
    assert not arithmetic.is_solution("3,8,5=6", answer)


def test_held_out_problems_are_never_learned_in_any_order_of_their_numbers():
    def key(problem):
        numbers, target = problem.question.split("=")
        return tuple(sorted(numbers.split(","))), target

    learned = {key(problem) for seed in (0, 1) for problem in arithmetic.problems(3000, seed=seed)}
    held = arithmetic.problems(150, seed=0, held_out=True)
    assert len({problem.question for problem in held}) == 150
    assert not learned & {key(problem) for problem in held}
    assert all(arithmetic.is_solution(problem.question, problem.answer) for problem in held)


def test_a_number_is_a_token():
    tokenizer = arithmetic.model(layers=1, width=16, seed=0).tokenizer
    assert len(tokenizer.encode("3,12,5=20\n")) == 8
    assert tokenizer.decode(tokenizer.encode("12-10=2\n2+7=9\n")) == "12-10=2\n2+7=9\n"
