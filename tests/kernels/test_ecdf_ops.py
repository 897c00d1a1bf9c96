"""Empirical CDFs compared with counting in integers and fractions, and with NumPy for large rows."""

import math
import threading
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from nlgrpo.kernels import ecdf, extension

COMPILED = extension.available() and hasattr(torch.ops.nlgrpo, "ecdf_ranks")
cpp_only = pytest.mark.skipif(not COMPILED, reason="torch.ops.nlgrpo has no op ecdf_ranks in this install")
IMPLS = ["torch", pytest.param("cpp", marks=cpp_only)]
INSTALLED = ["torch", *["cpp"] * COMPILED]  # one set of random cases for both
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIDES = ["strict", "weak", "mid"]
fuzz = settings(derandomize=True, max_examples=60, deadline=None, database=None)


def values(dtype):
    """Strategy for samples: ties, both zeros, infinities, denormals, neighbours of 1 in the last bit, any float."""
    info = torch.finfo(dtype)
    subnormal = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}.get(dtype, 5e-324)
    special = [0.0, -0.0, 1.0, 1 + info.eps, 1 - info.eps / 2, subnormal, info.tiny, info.max, math.inf, 2.0]
    special += [-x for x in special]
    return st.sampled_from(special) | st.sampled_from([1.0, 2.0, 3.0]) | st.floats(allow_nan=False)


@st.composite
def cases(draw, dtype, queries=False):
    """Rows of samples and their weights as lists, whether they are dense, and with ``queries`` rows of queries."""
    dense = draw(st.booleans())
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 14)))
    sizes = [shape[1]] * shape[0] if dense else draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    order = draw(st.sampled_from(["any", "any", "ascending", "descending", "equal"]))
    exact = lambda xs: torch.tensor(xs, dtype=torch.float64).to(dtype).tolist()  # noqa: E731
    rows = [exact(draw(st.lists(values(dtype), min_size=n, max_size=n))) for n in sizes]
    if order == "equal":
        rows = [[row[0]] * len(row) for row in rows]
    elif order != "any":
        rows = [sorted(row, reverse=order == "descending") for row in rows]
    mass = st.sampled_from([0.0, 1.0, 0.25, 3.0, 1e-9, 1e9]) | st.floats(0, 10)
    weights = [[1.0, *draw(st.lists(mass, min_size=n - 1, max_size=n - 1))] for n in sizes]
    if not queries:
        return rows, weights, dense
    Q = draw(st.integers(0, 8))
    counts = [Q] * len(rows) if dense else draw(st.lists(st.integers(0, 8), min_size=len(rows), max_size=len(rows)))
    query_rows = [
        exact(draw(st.lists(values(dtype) | st.sampled_from(row), min_size=n, max_size=n)))
        for row, n in zip(rows, counts, strict=True)
    ]
    return rows, weights, dense, query_rows


def packed(rows, dtype, dense):
    """Return rows as a tensor, and their offsets (None for dense rows)."""
    if dense:
        return torch.tensor(rows, dtype=dtype).reshape(len(rows), -1), None
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64)
    return torch.tensor([x for row in rows for x in row], dtype=dtype), offsets


def counted(rows, weights, query_rows, side):
    """CDF of each row at its queries, flat, by comparing all pairs in exact fractions."""
    found = []
    for row, mass, queries in zip(rows, weights, query_rows, strict=True):
        mass = [Fraction(w) for w in mass]
        for q in queries:
            strict = sum((w for x, w in zip(row, mass, strict=True) if x < q), Fraction(0))
            weak = sum((w for x, w in zip(row, mass, strict=True) if x <= q), Fraction(0))
            found.append({"strict": strict, "weak": weak, "mid": (strict + weak) / 2}[side] / sum(mass))
    return torch.tensor([float(x) for x in found], dtype=torch.float64)


def ones(rows):
    return [[1.0] * len(row) for row in rows]


def assert_cdf(found, truth, dtype, weighted):
    """Without weights, compare exactly with the fraction rounded once; with weights, up to the rounding of the sums."""
    assert found.dtype == dtype
    if weighted:
        tolerance = 1e-14 if dtype == torch.float64 else 1e-7
        torch.testing.assert_close(found.flatten().double(), truth, rtol=tolerance, atol=1e-17)
    else:
        assert torch.equal(found.flatten(), truth.to(dtype))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@fuzz
@given(data=st.data(), side=st.sampled_from(SIDES), double=st.booleans(), weighted=st.booleans())
def test_ranks(dtype, data, side, double, weighted):
    rows, weights, dense = data.draw(cases(dtype))
    x, offsets = packed(rows, dtype, dense)
    w = packed(weights, torch.float64, dense)[0] if weighted else None
    result = torch.float64 if double else torch.float32
    truth = counted(rows, weights if weighted else ones(rows), rows, side)
    for impl in INSTALLED:
        ours = ecdf.ranks(x, side, weights=w, offsets=offsets, dtype=result, impl=impl)
        assert ours.shape == x.shape
        assert_cdf(ours, truth, result, weighted)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@fuzz
@given(data=st.data(), side=st.sampled_from(SIDES), double=st.booleans(), weighted=st.booleans())
def test_cdf_and_evaluate(dtype, data, side, double, weighted):
    rows, weights, dense, query_rows = data.draw(cases(dtype, queries=True))
    x, offsets = packed(rows, dtype, dense)
    q, query_offsets = packed(query_rows, dtype, dense)
    w = packed(weights, torch.float64, dense)[0] if weighted else None
    result = torch.float64 if double else torch.float32
    options = {"offsets": offsets, "query_offsets": query_offsets, "dtype": result}
    truth = counted(rows, weights if weighted else ones(rows), query_rows, side)
    if weighted:
        ordered, mass = ecdf.sort_weighted(x, w, offsets=offsets)
        cumulative = ecdf.cumulate(mass, offsets=offsets)
    else:
        ordered, cumulative = ecdf.sort(x, offsets=offsets), None
    for impl in INSTALLED:
        ours = ecdf.cdf(x, q, side, weights=w, impl=impl, **options)
        assert ours.shape == q.shape
        assert_cdf(ours, truth, result, weighted)
        assert torch.equal(ecdf.evaluate(ordered, q, side, cumulative=cumulative, impl=impl, **options), ours)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@fuzz
@given(data=st.data())
def test_argsort_is_stable_and_sort_sorts(dtype, data):
    rows, _, dense = data.draw(cases(dtype))
    x, offsets = packed(rows, dtype, dense)
    truth = [sorted(range(len(row)), key=row.__getitem__) for row in rows]
    for impl in INSTALLED:
        ours = ecdf.argsort(x, offsets=offsets, impl=impl)
        assert ours.dtype == torch.int64
        assert torch.equal(ours, packed(truth, torch.int64, dense)[0])
    assert torch.equal(ecdf.sort(x, offsets=offsets), packed([sorted(row) for row in rows], dtype, dense)[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@fuzz
@given(data=st.data())
def test_merge(dtype, data):
    rows, weights, dense, other = data.draw(cases(dtype, queries=True))
    other = [row or [0.0] for row in other]
    a, b = [sorted(row) for row in rows], [sorted(row) for row in other]
    tags = [[-1.0 - i for i in range(len(row))] for row in b]  # negative, to tell them from those of a
    (x, of_x), (y, of_y) = packed(a, dtype, dense), packed(b, dtype, dense)
    w = packed(weights, torch.float64, dense)[0], packed(tags, torch.float64, dense)[0].abs()
    pairs = [
        sorted(zip([*p, *q], [*u, *(-t for t in v)], strict=True), key=lambda pair: pair[0])
        for p, q, u, v in zip(a, b, weights, tags, strict=True)
    ]
    offsets = None if dense else (of_x, of_y)
    truth = packed([[x for x, _ in row] for row in pairs], dtype, dense)[0]
    masses = packed([[m for _, m in row] for row in pairs], torch.float64, dense)[0]
    for impl in INSTALLED:
        assert torch.equal(ecdf.merge(x, y, offsets=offsets, impl=impl), truth)
        merged, mass = ecdf.merge(x, y, offsets=offsets, weights=w, impl=impl)
        assert torch.equal(merged, truth)
        assert torch.equal(mass, masses)


@fuzz
@given(data=st.data())
def test_cumulate_does_not_mix_rows(data):
    """A row of small weights after one of large weights loses no digits, and sums never decrease."""
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    scales = data.draw(st.lists(st.sampled_from([1e-12, 1.0, 1e15]), min_size=len(sizes), max_size=len(sizes)))
    rows = [[s * data.draw(st.floats(0, 1)) for _ in range(n)] for n, s in zip(sizes, scales, strict=True)]
    w, offsets = packed(rows, torch.float64, False)
    truth = [float(sum(map(Fraction, row[: i + 1]))) for row in rows for i in range(len(row))]
    sums = ecdf.cumulate(w, offsets=offsets)
    torch.testing.assert_close(sums, torch.tensor(truth, dtype=torch.float64), rtol=1e-14, atol=0)
    assert all((row.diff() >= 0).all() for row in sums.split(sizes))


# --- large rows -------------------------------------------------------------------------------------------------------

SIZES = [33, 600, 1024, 1025, 5000, 16384, 16385, 65535, 65536, 65537, 200_000, 1_000_000]
KINDS = [
    ("continuous", torch.float32),
    ("continuous", torch.float64),
    ("continuous", torch.float16),
    ("continuous", torch.bfloat16),
    ("tied", torch.float32),
    ("clustered", torch.float32),
    ("clustered", torch.float64),
    ("last bits", torch.float64),
    ("constant", torch.float32),
    ("two values", torch.float64),
    ("half equal", torch.float32),
    ("skewed", torch.float32),
    ("skewed", torch.float64),
    ("to the ends", torch.float32),
    ("to the ends", torch.float64),
    ("denormal", torch.float32),
    ("denormal", torch.float64),
]


def drawn(kind, M, dtype=torch.float32):
    g = torch.Generator().manual_seed(M)
    x = torch.randn(M, generator=g, dtype=torch.float64)
    if kind == "tied":
        x = (x * 20).round() / 7
    elif kind == "clustered":
        x = 1 + 1e-6 * torch.rand(M, generator=g, dtype=torch.float64)
        x[torch.randint(M, (9,), generator=g)] = torch.tensor([1e30, -1e-40, -1e30] * 3, dtype=torch.float64)
    elif kind == "last bits":
        x = 1 + torch.randint(2**20, (M,), generator=g).double() * 2.0**-52
    elif kind == "constant":
        x = torch.full_like(x, 0.7)
    elif kind == "two values":
        x = (x > 0.5).double()
    elif kind == "half equal":
        x[::2] = 0.25
    elif kind == "skewed":
        x = (9 * x).exp()
    elif kind == "to the ends":
        x = (2 * torch.rand(M, generator=g, dtype=torch.float64) - 1) * torch.finfo(dtype).max
    elif kind == "denormal":
        x = (x * 1000).round() * (5e-324 if dtype == torch.float64 else 2.0**-149)
    return x.to(dtype)


def by_unique(x, side):
    """Ranks of one row by `numpy.unique`: integer counts and one division."""
    _, inverse, sizes = np.unique(x.double().numpy(), return_inverse=True, return_counts=True)
    weak = np.cumsum(sizes)
    count, parts = {"strict": (weak - sizes, 1), "weak": (weak, 1), "mid": (2 * weak - sizes, 2)}[side]
    return torch.from_numpy((count / (parts * x.shape[0]))[inverse.reshape(-1)])


def by_searchsorted(x, q, side):
    ordered = np.sort(x.double().numpy())
    left, right = (np.searchsorted(ordered, q.double().numpy(), where) for where in ("left", "right"))
    count, parts = {"strict": (left, 1), "weak": (right, 1), "mid": (left + right, 2)}[side]
    return torch.from_numpy(count / (parts * x.shape[0]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("impl", IMPLS)
def test_ranks_of_large_rows(impl, kind, dtype):
    sizes = SIZES if impl == "cpp" else [1025, 65537, *([1_000_000] if kind == "tied" else [])]
    for M in sizes:
        x = drawn(kind, M, dtype)
        for side in SIDES if M < 150_000 else ["mid"]:
            truth = by_unique(x, side)
            assert torch.equal(ecdf.ranks(x, side, impl=impl), truth), (M, side)
        assert torch.equal(ecdf.ranks(x, side, impl=impl, dtype=torch.float32), truth.float()), M


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@fuzz
@given(data=st.data(), side=st.sampled_from(SIDES))
def test_ranks_of_rows_with_few_different_values(dtype, data, side):
    pool = torch.tensor(data.draw(st.lists(values(dtype), min_size=1, max_size=40)), dtype=torch.float64).to(dtype)
    sizes = data.draw(st.lists(st.integers(30, 300), min_size=1, max_size=9))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = [pool[torch.randint(len(pool), (n,), generator=g)] for n in sizes]
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    truth = torch.cat([by_unique(row, side) for row in rows])
    for impl in INSTALLED:
        assert torch.equal(ecdf.ranks(torch.cat(rows), side, offsets=offsets, impl=impl), truth)


@cpp_only
def test_rows_with_keys_that_span_exactly_32_bits():
    """The greatest key then equals the padding of a row that is sorted together with a longer one."""
    g = torch.Generator().manual_seed(0)
    rows = []
    for n in (5, 9, 17, 30, 33, 34, 40, 12):
        last = torch.randint(2**32, (n,), generator=g)
        last[0], last[-2:] = 0, 2**32 - 1
        rows.append((torch.ones(n, dtype=torch.float64).view(torch.int64) + last).view(torch.float64))
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    truth = torch.cat([by_unique(row, "mid") for row in rows])
    assert torch.equal(ecdf.ranks(torch.cat(rows), offsets=offsets, impl="cpp"), truth)


@cpp_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_whose_sample_is_not_representative(dtype):
    """A long row is partitioned by a sample of its elements, runs of 16; here they differ from all the others."""
    M, step = 2**18, 32
    g = torch.Generator().manual_seed(0)
    x = 5 + torch.rand(M, generator=g, dtype=torch.float64) / 1000
    run = np.arange(M // (16 * step), dtype=np.uint64)
    mixed = (run * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)  # as in csrc/partition.h
    first = torch.from_numpy(((run * np.uint64(step) + mixed % np.uint64(step)) * np.uint64(16)).astype(np.int64))
    sampled = (first[:, None] + torch.arange(16)).flatten()
    x[sampled] = torch.rand(len(sampled), generator=g, dtype=torch.float64)
    x = x.to(dtype)
    assert torch.equal(ecdf.ranks(x, impl="cpp"), by_unique(x, "mid"))
    assert torch.equal(ecdf.argsort(x, impl="cpp"), torch.from_numpy(np.argsort(x.numpy(), kind="stable")))
    weak = ecdf.ranks(x, "weak", weights=torch.full((M,), 0.5), impl="cpp")
    torch.testing.assert_close(weak, by_unique(x, "weak"), rtol=1e-12, atol=0)


@cpp_only
@pytest.mark.parametrize("M", [40, 600, 20_000, 70_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_compiled_op_causes_no_invalid_access(dtype, M):
    """The Python functions refuse NaN. In the ops its results are undefined, but accesses stay within bounds."""
    for where in (slice(3, 4), slice(None, None, 2), slice(None)):
        x = drawn("continuous", M, dtype)
        x[where] = math.nan
        for weights in (None, torch.ones(1, M, dtype=torch.float64)):
            assert torch.ops.nlgrpo.ecdf_ranks(x[None], None, weights, 2, True).shape == (1, M)
        assert torch.ops.nlgrpo.ecdf_argsort(x[None], None).sort().values.equal(torch.arange(M)[None])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("impl", IMPLS)
def test_argsort_of_large_rows(impl, kind, dtype):
    for M in [M for M in SIZES if M < 500_000] if impl == "cpp" else [1025, 65537]:
        x = drawn(kind, M, dtype)
        ours, wide = ecdf.argsort(x, impl=impl), x.double().numpy()
        assert torch.equal(ours, torch.from_numpy(np.argsort(wide, kind="stable"))), M
        assert torch.equal(ecdf.sort(x), x[ours]), M


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("impl", IMPLS)
def test_cdf_at_many_queries(impl, kind, dtype):
    for M, Q in [(1024, 7), (7, 5000), (65537, 65536), (200_000, 300_000)][: None if impl == "cpp" else 3]:
        x, own = drawn(kind, M, dtype), drawn(kind, Q, dtype)
        q = torch.where(torch.arange(Q) % 2 == 0, own, x[torch.arange(Q) % M])
        for query_rows in (q, q.sort().values):
            for side in SIDES if M < 150_000 else ["mid"]:
                assert torch.equal(ecdf.cdf(x, query_rows, side, impl=impl), by_searchsorted(x, query_rows, side)), (
                    M,
                    side,
                )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["continuous", "tied", "clustered"])
def test_many_rows_of_all_lengths(impl, kind):
    sizes = [1, 1023, 2, 1025, 70_000, 3, 64, 63, 65, 31, 4096, 9000, 1]
    rows = [drawn(kind, n) for n in sizes]
    x, offsets = torch.cat(rows), torch.tensor([0, *np.cumsum(sizes)])
    truth = torch.cat([by_unique(row, "mid") for row in rows])
    assert torch.equal(ecdf.ranks(x, offsets=offsets, impl=impl), truth)
    assert torch.equal(ecdf.ranks(x, offsets=offsets.int(), impl=impl), truth)
    assert torch.equal(ecdf.cdf(x, x, offsets=offsets, query_offsets=offsets, impl=impl), truth)
    weights = torch.full_like(x, 0.25)
    torch.testing.assert_close(ecdf.ranks(x, weights=weights, offsets=offsets, impl=impl), truth, rtol=1e-13, atol=0)
    order = torch.cat([torch.from_numpy(np.argsort(row.numpy(), kind="stable")) for row in rows])
    assert torch.equal(ecdf.argsort(x, offsets=offsets, impl=impl), order)
    dense = torch.stack([drawn(kind, 600)[torch.randperm(600)] for _ in range(50)])
    assert torch.equal(ecdf.ranks(dense, impl=impl), torch.stack([by_unique(row, "mid") for row in dense]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("M", [5000, 200_000])
def test_weighted_ranks_of_large_rows(impl, M):
    x, w = drawn("tied", M), torch.rand(M, generator=torch.Generator().manual_seed(1)).double()
    values, inverse = np.unique(x.numpy(), return_inverse=True)
    mass = [math.fsum(w[inverse == i].tolist()) for i in range(len(values))]
    weak = np.array([math.fsum(mass[: i + 1]) for i in range(len(mass))])
    truth = torch.from_numpy((weak / weak[-1])[inverse])
    torch.testing.assert_close(ecdf.ranks(x, "weak", weights=w, impl=impl), truth, rtol=1e-12, atol=0)
    torch.testing.assert_close(ecdf.cdf(x, x, "weak", weights=w, impl=impl), truth, rtol=1e-12, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_merge_of_large_rows(impl):
    for M, N in ((1023, 65537), (200_000, 1), (100_000, 100_001)):
        a, b = drawn("tied", M).sort().values, drawn("continuous", N).sort().values
        assert torch.equal(ecdf.merge(a, b, impl=impl), torch.cat((a, b)).sort().values)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", ["continuous", "tied", "clustered"])
def test_the_number_of_threads_does_not_change_a_bit(impl, kind):
    M = 250_000 if impl == "cpp" else 50_000
    long, rows = drawn(kind, M), drawn(kind, M // 700 * 700).view(-1, 700)
    mass = torch.rand(M, generator=torch.Generator().manual_seed(2))
    offsets = torch.tensor([0, 1, M // 2, M - 1000, M])
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3) if impl == "cpp" else (1, 2):
            torch.set_num_threads(threads)
            results.append(
                (
                    ecdf.ranks(long, impl=impl),
                    ecdf.ranks(long, weights=mass, impl=impl),
                    ecdf.ranks(long, weights=mass, offsets=offsets, impl=impl),
                    ecdf.ranks(rows, weights=mass[: rows.numel()].view_as(rows), impl=impl),
                    ecdf.argsort(long, impl=impl),
                    ecdf.cdf(long, rows, weights=mass, impl=impl),
                    ecdf.merge(long.sort().values, rows.view(-1).sort().values, impl=impl),
                )
            )
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# --- shapes, dtypes and refused arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
def test_shapes_and_strides(impl):
    x = drawn("tied", 240)
    rows = x.view(2, 3, 40)
    ours = ecdf.ranks(rows, impl=impl)
    assert ours.shape == rows.shape
    assert torch.equal(ours[1, 2], by_unique(rows[1, 2], "mid"))
    assert torch.equal(ecdf.ranks(x.view(40, 6).t(), impl=impl), ecdf.ranks(x.view(40, 6).t().contiguous(), impl=impl))
    assert torch.equal(ecdf.ranks(x[::3], impl=impl), by_unique(x[::3], "mid"))
    assert torch.equal(ecdf.cdf(x, rows, impl=impl), ecdf.ranks(x, impl=impl).view(2, 3, 40))
    assert torch.equal(ecdf.cdf(x, x[5], impl=impl), ecdf.ranks(x, impl=impl)[5])
    assert ecdf.cdf(x, x[:0], impl=impl).shape == (0,)
    assert ecdf.cdf(rows, rows[..., :2], impl=impl).shape == (2, 3, 2)
    assert torch.equal(ecdf.cdf(rows, rows.flip(-1), impl=impl), ours.flip(-1))
    assert ecdf.ranks(torch.empty(0, 7), impl=impl).shape == (0, 7)
    assert ecdf.argsort(torch.empty(0, 7), impl=impl).shape == (0, 7)
    assert ecdf.cdf(torch.empty(0, 7), torch.empty(0, 3), impl=impl).shape == (0, 3)
    none = torch.zeros(1, dtype=torch.int64)
    assert ecdf.ranks(torch.empty(0), offsets=none, impl=impl).shape == (0,)
    assert ecdf.cdf(torch.empty(0), torch.empty(0), offsets=none, query_offsets=none, impl=impl).shape == (0,)
    assert ecdf.merge(torch.empty(0, 3), torch.empty(0, 2), impl=impl).shape == (0, 5)
    assert ecdf.ranks(torch.tensor([5.0]), impl=impl).tolist() == [0.5]


@pytest.mark.parametrize("impl", IMPLS)
def test_different_dtypes_are_compared_exactly(impl):
    """1/3 in float32 is above 1/3 in float64, and no float16 is between them."""
    x = torch.tensor([1 / 3], dtype=torch.float32)
    q = torch.tensor([1 / 3, float(x)], dtype=torch.float64)
    assert ecdf.cdf(x, q, impl=impl).tolist() == [0, 0.5]
    assert ecdf.cdf(q, x, "strict", impl=impl).tolist() == [0.5]
    half, brain = torch.tensor([1 + 2**-10], dtype=torch.float16), torch.tensor([1.0, 2.0**100], dtype=torch.bfloat16)
    assert ecdf.cdf(half, brain, "weak", impl=impl).tolist() == [0, 1]
    assert ecdf.cdf(brain, half, "weak", impl=impl).tolist() == [0.5]


@pytest.mark.parametrize("impl", IMPLS)
def test_results_do_not_require_a_gradient(impl):
    x, w = torch.randn(5, requires_grad=True), torch.rand(5, requires_grad=True)
    assert not ecdf.ranks(x, weights=w, impl=impl).requires_grad
    assert not ecdf.cdf(x, x, impl=impl).requires_grad
    before = x.detach().clone()
    ecdf.sort(x)
    assert torch.equal(x, before)


nan = math.nan


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": torch.tensor([1.0, nan, nan])}, r"samples\[1\] is NaN"),
        ({"samples": torch.tensor([[1.0, 2.0], [3.0, nan]])}, r"samples\[1, 1\] is NaN"),
        ({"samples": torch.tensor([[1.0, 2.0], [3.0, nan]]).bfloat16().t()}, r"samples\[1, 1\] is NaN"),
        ({"samples": -torch.tensor([[1.0, nan], [3.0, nan]]).half()}, r"samples\[0, 1\] is NaN"),
        (
            {"samples": torch.tensor([1, 2, nan]), "offsets": torch.tensor([0, 1, 3])},
            r"samples\[2\] \(in row 1\) is NaN",
        ),
        ({"samples": torch.ones(0)}, r"\(\.\.\., M\) with M >= 1, got \(0,\)"),
        ({"samples": torch.ones(4, 0)}, r"got \(4, 0\)"),
        ({"samples": torch.tensor(1.0)}, r"got \(\)"),
        ({"samples": torch.arange(3)}, "samples: expected float16, .* got int64"),
        ({"samples": torch.ones(3, dtype=torch.complex64)}, "got complex64"),
        ({"samples": [1.0, 2.0]}, "samples: expected a tensor, got list"),
        ({"offsets": torch.tensor([0, 1, 1, 3])}, "row 1 of samples is empty"),
        (
            {"offsets": torch.tensor([0, 2, 1, 3])},
            "they decrease from 2 to 1 after row 1; expected them to increase from 0 to 3",
        ),
        ({"offsets": torch.tensor([1, 3])}, "the first must be 0, got 1"),
        ({"offsets": torch.tensor([-1, 3])}, "the first must be 0, got -1"),
        ({"offsets": torch.tensor([0, 2])}, "the last must be 3, the number of elements of samples, got 2"),
        ({"offsets": torch.tensor([0, 2, 4])}, "row 1 ends at 4, but samples has 3"),
        ({"offsets": torch.tensor([0, 9, 3])}, "row 0 ends at 9"),
        ({"offsets": torch.tensor([0, -(2**62), 3])}, "they decrease"),
        ({"offsets": torch.tensor([], dtype=torch.int64)}, r"int64 tensor \(P \+ 1,\), got torch.int64 \(0,\)"),
        ({"offsets": torch.tensor([[0, 3]])}, r"got torch.int64 \(1, 2\)"),
        ({"offsets": torch.tensor([0.0, 3.0])}, r"got torch.float32 \(2,\)"),
        ({"offsets": [0, 3]}, "got list"),
        ({"offsets": torch.empty(2, dtype=torch.int64, device="meta")}, "offsets are on meta, but samples on cpu"),
        (
            {"samples": torch.ones(1, 3), "offsets": torch.tensor([0, 3])},
            r"expected the rows concatenated, \(S,\), got \(1, 3\)",
        ),
        ({"weights": torch.ones(2)}, r"weights: expected \(3,\) on cpu, one per sample, got \(2,\)"),
        ({"weights": torch.ones(3, device="meta")}, "got .* on meta"),
        ({"weights": torch.ones(3).long()}, "weights: expected float16"),
        ({"weights": torch.tensor([1.0, nan, 1.0])}, r"weights\[1\] is nan; expected a finite number >= 0"),
        ({"weights": torch.tensor([1.0, 1.0, -1.0])}, r"weights\[2\] is -1"),
        ({"weights": torch.tensor([math.inf, 1.0, 1.0])}, r"weights\[0\] is inf"),
        ({"weights": torch.zeros(3)}, "row 0 sum to 0"),
        ({"weights": torch.full((3,), 1e308, dtype=torch.float64)}, "row 0 sum to inf"),
        ({"weights": torch.tensor([1.0, 0.0, 0.0]), "offsets": torch.tensor([0, 1, 3])}, "row 1 sum to 0"),
        ({"side": "middle"}, "side='middle' is not known; expected 'strict'"),
        ({"dtype": torch.float16}, "dtype=torch.float16: expected torch.float64 or torch.float32"),
        ({"impl": "triton"}, "impl='triton' is not known to ecdf_ranks; expected 'auto', 'cpp' or 'torch'"),
    ],
)
def test_ranks_refuses(impl, change, message):
    given = {"samples": torch.tensor([1.0, 2.0, 3.0]), "impl": impl} | change
    with pytest.raises(ValueError, match=message):
        ecdf.ranks(**given)
    if not change.keys() & {"weights", "side", "dtype", "impl"}:
        with pytest.raises(ValueError, match=message):
            ecdf.argsort(**given)
        with pytest.raises(ValueError, match=message):
            ecdf.sort(given["samples"], offsets=given.get("offsets"))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": torch.tensor([nan, 1.0])}, r"samples\[0\] is NaN"),
        ({"queries": torch.tensor([[0.0, 1.0], [nan, 1.0]])}, r"queries\[1, 0\] is NaN"),
        ({"queries": torch.tensor(nan)}, "queries is NaN"),
        ({"queries": torch.arange(3)}, "queries: expected float16"),
        ({"queries": torch.ones(2, device="meta")}, "queries are on meta"),
        ({"samples": torch.ones(2, 3)}, r"queries: expected \(2, Q\) for samples \(2, 3\), got \(4,\)"),
        ({"samples": torch.ones(2, 3), "queries": torch.ones(3, 2)}, r"got \(3, 2\)"),
        ({"samples": torch.ones(2, 3), "queries": torch.tensor(1.0)}, r"got \(\)"),
        ({"query_offsets": torch.tensor([0, 4])}, "give both offsets and query_offsets, or neither"),
        ({"offsets": torch.tensor([0, 1, 2])}, "give both"),
        (
            {"offsets": torch.tensor([0, 1, 2]), "query_offsets": torch.tensor([0, 4])},
            "the number of rows of the samples, 2, got 1",
        ),
        (
            {"offsets": torch.tensor([0, 1, 2]), "query_offsets": torch.tensor([0, 5, 4])},
            "row 0 ends at 5, but queries has 4",
        ),
        ({"offsets": torch.tensor([0, 1, 2]), "query_offsets": torch.tensor([0, 0, 3])}, "the last must be 4"),
        ({"side": None}, "side=None"),
        ({"side": ["mid"]}, r"side=\['mid'\] is not known"),
        ({"impl": "best"}, "impl='best'"),
    ],
)
def test_cdf_and_evaluate_refuse(impl, change, message):
    given = {"samples": torch.tensor([1.0, 2.0]), "queries": torch.ones(4), "impl": impl} | change
    with pytest.raises(ValueError, match=message):
        ecdf.cdf(**given)
    if "samples[0]" not in message.replace("\\", ""):
        with pytest.raises(ValueError, match=message):
            ecdf.evaluate(given.pop("samples"), **given)


def test_a_nan_query_of_a_ragged_row_is_named():
    of, q = torch.tensor([0, 1, 2]), torch.tensor([1.0, 2.0, nan])
    with pytest.raises(ValueError, match=r"queries\[2\] \(in row 1\) is NaN"):
        ecdf.cdf(torch.ones(2), q, offsets=of, query_offsets=torch.tensor([0, 0, 3]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": torch.ones(3).double()}, "a is torch.float32 on cpu and b torch.float64 on cpu"),
        ({"b": torch.ones(2, 3)}, r"same rows, got shape \(2,\) and shape \(2, 3\)"),
        ({"offsets": (torch.tensor([0, 1, 2]), torch.tensor([0, 3]))}, "2 ragged rows and 1 ragged rows"),
        ({"offsets": (torch.tensor([0, 2]), torch.tensor([0, 2]))}, r"offsets\[1\]: the last must be 3"),
        ({"weights": (torch.ones(2), torch.ones(2))}, r"weights: expected \(3,\)"),
        ({"weights": (torch.ones(2), -torch.ones(3))}, r"weights\[0\] is -1"),
        ({"offsets": (torch.tensor([0, 2]), None)}, "offsets: expected a pair of tensors, for a and b, got tuple"),
        ({"weights": torch.ones(2)}, "weights: expected a pair of tensors, for a and b, got Tensor"),
        ({"impl": "triton"}, "not known to ecdf_merge"),
    ],
)
def test_merge_refuses(impl, change, message):
    with pytest.raises(ValueError, match=message):
        ecdf.merge(**({"a": torch.ones(2), "b": torch.ones(3), "impl": impl} | change))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ranks", "weighted", "cdf", "argsort", "ragged", "ragged cdf", "merge"])
def test_one_graph_serves_all_sizes(what):
    def compute(x, w, offsets):
        flat, mass = x.view(-1), w.view(-1)
        return {
            "ranks": lambda: ecdf.ranks(x),
            "weighted": lambda: ecdf.ranks(x, "weak", weights=w, dtype=torch.float32),
            "cdf": lambda: ecdf.cdf(x, w, "strict"),
            "argsort": lambda: ecdf.argsort(x),
            "ragged": lambda: ecdf.ranks(flat, weights=mass, offsets=offsets),
            "ragged cdf": lambda: ecdf.cdf(flat, mass, offsets=offsets, query_offsets=offsets),
            "merge": lambda: ecdf.merge(x.sort(-1).values, w.sort(-1).values),
        }[what]()

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compute, fullgraph=True, backend=counter)
    for P, M in ((3, 5), (4, 6), (2, 17), (6, 1000)):
        given = drawn("tied", P * M).view(P, M), drawn("tied", P * M + 1)[1:].view(P, M).abs(), torch.arange(P + 1) * M
        torch.testing.assert_close(
            compiled(*given), compute(*given), rtol=1e-14, atol=0
        )  # weights may be summed in another order
    assert counter.frame_count <= 2  # the first one is for fixed sizes


def test_cpp_is_refused_inside_torch_compile():
    compiled = torch.compile(lambda x: ecdf.ranks(x, impl="cpp"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"inside torch\.compile"):
        compiled(torch.ones(3))


@cpp_only
def test_ops_release_the_gil():
    """Another thread runs Python code during an op."""
    x, moments, done = drawn("continuous", 4_000_000), [], threading.Event()

    def tick():
        while not done.is_set():
            moments.append(time.perf_counter())
            time.sleep(1e-4)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.perf_counter()
        ecdf.ranks(x, impl="cpp")
        end = time.perf_counter()
    finally:
        done.set()
        thread.join()
    margin = 0.2 * (end - begin)
    assert sum(begin + margin < moment < end - margin for moment in moments) >= 3, f"a call of {end - begin:.3f} s"
