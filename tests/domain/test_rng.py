"""Noise: the published known answers, the distribution, and that nothing but key, atom and step matters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from mattermill.domain.rng import gaussians, noise_key, philox_words

# Random123 1.14, examples/kat_vectors: philox4x32 10 rounds (counter, key, answer).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


KEY_OF_AR = 5669363314183019075


def words(text: str) -> np.ndarray:
    return np.array([[int(w, 16) for w in text.split()]], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert [f"{w:08x}" for w in philox_words(words(counter), words(key))[0]] == answer.split()


def draw(n: int, key: int = 12345, step: int = 7) -> np.ndarray:
    zeros = torch.zeros(n, dtype=torch.int64)
    return gaussians(torch.tensor([key]), zeros, torch.arange(n), torch.tensor([step])).numpy()


def test_normal_distribution_and_no_correlation() -> None:
    x = draw(200_000)
    for axis in range(3):
        assert stats.kstest(x[:, axis], "norm").pvalue > 1e-3
    assert abs(x.mean()) < 4 / np.sqrt(x.size)
    assert abs(x.var() - 1) < 4 * np.sqrt(2 / x.size)
    correlation = np.corrcoef(np.concatenate([x[:-1], x[1:]], axis=1).T)
    assert np.abs(correlation - np.eye(6)).max() < 5 / np.sqrt(len(x))


def test_steps_keys_and_purposes_differ() -> None:
    base = draw(1000)
    for other in (draw(1000, step=8), draw(1000, key=12346), draw(1000, key=-12345)):
        assert abs(np.corrcoef(base.ravel(), other.ravel())[0, 1]) < 5 / np.sqrt(base.size)
    parts = [(0, "a", "heat", "velocities"), (1, "a", "heat", "velocities"), (0, "b", "heat", "velocities")]
    parts += [(0, "a", "heat2", "velocities"), (0, "a", "heat", "langevin"), (0, "ah", "eat", "velocities")]
    assert len({noise_key(*p) for p in parts}) == len(parts)
    assert all(-(2**63) <= noise_key(*p) < 2**63 for p in parts)


def test_key_is_stable_across_versions() -> None:
    # A stored campaign resumes with this noise: a change here breaks continuity and must be deliberate.
    assert noise_key(0, "Ar", "heat", "langevin") == KEY_OF_AR


def test_company_and_order_do_not_matter() -> None:
    """Any subset in any order, beside any other system: the same bits."""
    rng = np.random.default_rng(0)
    whole = draw(1001)
    pick = torch.from_numpy(rng.permutation(1001)[:337])
    system = torch.ones(337, dtype=torch.int64)
    out = gaussians(torch.tensor([99, 12345]), system, pick, torch.tensor([3, 7])).numpy()
    np.testing.assert_array_equal(out, whole[pick.numpy()])


def test_large_ids_and_steps_use_the_upper_words() -> None:
    big = 2**32
    zero = torch.zeros(1, dtype=torch.int64)
    key = torch.tensor([1])
    low = gaussians(key, zero, torch.tensor([5]), torch.tensor([3]))
    assert not torch.equal(low, gaussians(key, zero, torch.tensor([5 + big]), torch.tensor([3])))
    assert not torch.equal(low, gaussians(key, zero, torch.tensor([5]), torch.tensor([3 + big])))
