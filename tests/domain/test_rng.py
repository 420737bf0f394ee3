"""Noise: the published known answers, the distribution, and that nothing but key, atom and step matters."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from mattermill.domain.rng import ROWS, gaussians, noise_key

# Random123 1.14, examples/kat_vectors: philox4x32 10 rounds (counter, key, answer).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
#: Words at which a logarithm or an angle changes its branch, and the outermost ones.
EDGES = [0, 1, 2**29 - 1, 2**29, 2**30, 3 * 2**29, 2**31, 3037000499, 3037000500, 3 * 2**30, 7 * 2**29, 2**32 - 1]

KEY_OF_AR = 5669363314183019075


def words(text: str) -> list[int]:
    return [int(w, 16) for w in text.split()]


def number(low: int, high: int) -> int:
    """Two words as the int64 that has them as its bits."""
    return int(np.uint64(high << 32 | low).astype(np.int64))


def expected(answer: list[int]) -> np.ndarray:
    """Box-Muller in extended precision."""
    u = (np.array(answer, dtype=np.longdouble) + np.longdouble(0.5)) / 2**32
    pi = np.arctan(np.longdouble(1)) * 4
    r, t = np.sqrt(-2 * np.log(u[::2])), 2 * pi * u[1::2]
    return np.array([r[0] * np.cos(t[0]), r[0] * np.sin(t[0]), r[1] * np.cos(t[1])])


def normals(counters: list[list[int]], key: list[int]) -> np.ndarray:
    """What `gaussians` makes of whole counters."""
    out = [
        gaussians(
            torch.tensor([number(*key)]),
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([number(*counter[:2])]),
            torch.tensor([number(*counter[2:])]),
        )
        for counter in counters
    ]
    return torch.cat(out).numpy()


def counter_of(answer: list[int], key: list[int]) -> list[int]:
    """The counter that Philox4x32-10 turns into these words: the ten rounds backwards (Random123's recurrence)."""
    m0, m1, mask = 0xD2511F53, 0xCD9E8D57, 2**32 - 1
    c = list(answer)
    for r in reversed(range(10)):
        k0, k1 = (key[0] + r * 0x9E3779B9) & mask, (key[1] + r * 0xBB67AE85) & mask
        # The lower half of a product by an odd number gives back the other factor.
        c2, c0 = c[1] * pow(m1, -1, 2**32) & mask, c[3] * pow(m0, -1, 2**32) & mask
        c = [c0, c[0] ^ (m1 * c2 >> 32) ^ k0, c2, c[2] ^ (m0 * c0 >> 32) ^ k1]
    return c


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    """The three normals take in all four words."""
    assert counter_of(words(answer), words(key)) == words(counter)
    got = normals([words(counter)], words(key))[0]
    np.testing.assert_allclose(got, expected(words(answer)).astype(float), rtol=0, atol=2e-15)


def test_normals_are_exact_at_every_edge_of_the_series() -> None:
    key = [7, 2**31]
    answers = [[a, b, b, a] for a, b in itertools.product(EDGES, EDGES)]
    got = normals([counter_of(answer, key) for answer in answers], key)
    exact = np.array([expected(answer) for answer in answers])
    assert np.abs(got - exact).max() < 2e-15
    assert np.abs(got).max() > 6.7
    # ln u next to 0: as exact as it is small
    last = normals([counter_of([2**32 - 1, 0, 0, 0], key)], key)[0, 0]
    assert abs(last / expected([2**32 - 1, 0, 0, 0])[0] - 1) < 1e-15


def draw(n: int, key: int = 12345, step: int = 7) -> np.ndarray:
    zeros = torch.zeros(n, dtype=torch.int32)
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
    system = torch.ones(337, dtype=torch.int32)
    out = gaussians(torch.tensor([99, 12345]), system, pick, torch.tensor([3, 7])).numpy()
    np.testing.assert_array_equal(out, whole[pick.numpy()])


def test_large_ids_and_steps_use_the_upper_words() -> None:
    big = 2**32
    zero = torch.zeros(1, dtype=torch.int32)
    key = torch.tensor([1])
    low = gaussians(key, zero, torch.tensor([5]), torch.tensor([3]))
    assert not torch.equal(low, gaussians(key, zero, torch.tensor([5 + big]), torch.tensor([3])))
    assert not torch.equal(low, gaussians(key, zero, torch.tensor([5]), torch.tensor([3 + big])))


@pytest.mark.parametrize("n", range(2 * ROWS + 2))
def test_any_number_of_atoms(n: int) -> None:
    """Rows are worked out side by side: those at the end too."""
    np.testing.assert_array_equal(draw(n), draw(5 * ROWS)[:n])
