"""Laws of keyed randomness: a draw is a function of its key and of nothing else."""

import json
import subprocess
import sys

import numpy as np
import pytest

from dapo.core.rng import keyed_permutation, keyed_seed, keyed_uniforms

GOLDEN_SEED = 3666893583778541810
GOLDEN_UNIFORMS = [0.8720734548204873, 0.29536538151378355, 0.4200976785072422, 0.4053922457839946]
GOLDEN_PERMUTATION = [4, 9, 2, 5, 8, 7, 6, 3, 1, 0]


def test_golden_numbers_are_the_same_on_every_machine_and_version():
    # a change here means that no old run can be resumed or repeated: it belongs in the changelog
    assert keyed_seed(0, "token", 1, 2, 3) == GOLDEN_SEED
    assert keyed_uniforms(7, 4).tolist() == GOLDEN_UNIFORMS
    assert keyed_permutation(10, 0, "data", 0).tolist() == GOLDEN_PERMUTATION


def test_another_process_has_the_same_numbers():
    code = (
        "import json; from dapo.core.rng import *; "
        "print(json.dumps([keyed_seed(0, 'token', 1, 2, 3), keyed_uniforms(7, 4).tolist()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [GOLDEN_SEED, GOLDEN_UNIFORMS]


def test_a_numpy_integer_is_the_same_key_as_the_int_and_strings_never_run_together():
    assert keyed_seed(np.int64(3), "a") == keyed_seed(3, "a")
    assert keyed_seed("a", "b") != keyed_seed("a\x1fb") != keyed_seed("a", "b", "")
    assert keyed_seed(1) != keyed_seed("1")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 64, 999])
def test_number_t_does_not_depend_on_how_many_are_sampled(count):
    assert keyed_uniforms(7, count).tolist() == keyed_uniforms(7, 1000)[:count].tolist()


def test_numbers_lie_in_zero_to_one_and_fill_it_evenly():
    draws = keyed_uniforms(3, 100_000)
    assert draws.dtype == np.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    # 10 bins of 10,000 +- 95 each: 5 sigma is 474
    assert np.abs(np.histogram(draws, bins=10, range=(0, 1))[0] - 10_000).max() < 474


def test_adjacent_seeds_give_unrelated_streams():
    first = keyed_uniforms(1, 20_000)
    second = keyed_uniforms(2, 20_000)
    assert not np.intersect1d(first, second).size
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.036  # 5 sigma


def test_drawing_touches_no_global_generator():
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    keyed_uniforms(7, 100)
    keyed_permutation(100, 1)
    assert np.random.get_state()[1].tolist() == before


def test_every_part_of_a_key_matters_and_so_do_its_position_and_type():
    keys = [
        (),
        (0,),
        ("0",),
        (0, 0),
        (0, 1),
        (1, 0),
        (1,),
        (10,),
        ("1", "0"),
        ("10",),
        ("token", 1, 23),
        ("token", 12, 3),
        ("token", 123),
        (-1,),
        ("",),
        ("", ""),
    ]
    assert len({keyed_seed(*key) for key in keys}) == len(keys)


def test_a_hundred_thousand_keys_have_different_seeds():
    seeds = {
        keyed_seed(0, "token", step, n, i)
        for step in range(10)
        for n in range(625)
        for i in range(16)
    }
    assert len(seeds) == 100_000
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


@pytest.mark.parametrize("size", [0, 1, 2, 17, 1000])
def test_a_permutation_holds_every_number_once_and_is_a_function_of_its_key(size):
    order = keyed_permutation(size, 5, "data", 3)
    assert sorted(order.tolist()) == list(range(size))
    assert order.tolist() == keyed_permutation(size, 5, "data", 3).tolist()


def test_epochs_and_runs_are_ordered_differently():
    orders = {
        tuple(keyed_permutation(50, seed, "data", epoch).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_a_permutation_favours_no_position():
    positions = np.array([keyed_permutation(5, "position", n) for n in range(5000)])
    counts = np.array([np.bincount(positions[:, position], minlength=5) for position in range(5)])
    assert np.abs(counts - 1000).max() < 142  # 5 sigma of 28.3
