"""`ECDF` compared with counting, NumPy's quantiles, and SciPy's fits and Kolmogorov-Smirnov test."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.truths import normal

from nlgrpo.calibration import ecdf
from nlgrpo.calibration.ecdf import ECDF, ks_distance, ks_test
from nlgrpo.calibration.log_cdf import fit_exponential

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
fuzz = settings(derandomize=True, max_examples=80, deadline=None, database=None)
numbers = st.sampled_from([0.0, -0.0, 1.0, 2.0, math.inf, -math.inf, 1e-45]) | st.floats(-4, 4)
masses = st.sampled_from([0.0, 1.0, 1.0, 0.5]) | st.floats(0, 4)


def offsets_of(sizes):
    return torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64)


@st.composite
def layouts(draw):
    """Strategy for samples, weights or None, offsets or None, and the rows as lists of (sample, weight)."""
    kind = draw(st.sampled_from(["one", "dense", "ragged"]))
    dtype, weighted = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    size = draw(st.integers(1, 9))
    sizes = {"one": [size], "dense": [size] * draw(st.integers(1, 3))}.get(kind)
    sizes = sizes or draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    x = torch.tensor(draw(st.lists(numbers, min_size=sum(sizes), max_size=sum(sizes))), dtype=torch.float64).to(dtype)
    w = torch.tensor(draw(st.lists(masses, min_size=sum(sizes), max_size=sum(sizes))), dtype=torch.float64)
    w[[0, *np.cumsum(sizes)[:-1]]] = 1.0
    rows = [list(zip(*pair, strict=True)) for pair in zip(x.split(sizes), w.split(sizes), strict=True)]
    rows = [[(float(v), float(m) if weighted else 1.0) for v, m in row] for row in rows]
    if kind == "dense":
        x, w = x.view(len(sizes), size), w.view(len(sizes), size)
    return x, w if weighted else None, offsets_of(sizes) if kind == "ragged" else None, rows


def weak(row, x):
    return math.fsum(m for v, m in row if v <= x) / math.fsum(m for _, m in row)


def strict(row, x):
    return math.fsum(m for v, m in row if v < x) / math.fsum(m for _, m in row)


@fuzz
@given(layouts(), st.lists(numbers, min_size=1, max_size=5))
def test_cdf_of_any_layout(layout, points):
    x, w, offsets, rows = layout
    e = ECDF(x, weights=w, offsets=offsets)
    queries, query_offsets = torch.tensor(points, dtype=torch.float64), None
    if offsets is not None:
        queries, query_offsets = queries.repeat(len(rows)), torch.arange(len(rows) + 1) * len(points)
    elif x.ndim == 2:
        queries = queries.expand(len(rows), -1)
    assert len(e) == x.numel()
    for side, by_hand in (("weak", weak), ("strict", strict)):
        truth = torch.tensor([by_hand(row, q) for row in rows for q in points], dtype=torch.float64)
        ours = e.cdf(queries, side, query_offsets=query_offsets)
        torch.testing.assert_close(ours.flatten(), truth, rtol=1e-14, atol=0)
    single = e.cdf(queries, query_offsets=query_offsets, dtype=torch.float32)
    assert single.dtype == torch.float32
    again = ecdf.cdf(x, queries, weights=w, offsets=offsets, query_offsets=query_offsets, dtype=torch.float32)
    assert torch.equal(single, again)


@fuzz
@given(layouts(), st.lists(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1), min_size=1, max_size=5))
def test_quantiles_equal_numpy(layout, probabilities):
    """Compare with NumPy's "inverted_cdf" with weights, 1 for unweighted rows."""
    x, w, offsets, rows = layout
    ours = ECDF(x, weights=w, offsets=offsets).quantile(torch.tensor(probabilities, dtype=torch.float64))
    assert ours.dtype == x.dtype
    assert ours.shape == (
        (len(rows), len(probabilities)) if offsets is not None or x.ndim == 2 else (len(probabilities),)
    )
    for row, found in zip(rows, ours.reshape(len(rows), -1).tolist(), strict=True):
        values, mass = (np.array(column) for column in zip(*row, strict=True))
        assert found == np.quantile(values, probabilities, weights=mass, method="inverted_cdf").tolist()


def test_quantiles_at_multiples_of_1_over_M():
    """k / M is rounded. If k / M * M rounds to above k, as for 7/25, NumPy without weights returns the next sample."""
    for M in [*range(1, 130), 1000, 12345]:
        x = torch.arange(1, M + 1, dtype=torch.float64)
        e, k = ECDF(x), torch.arange(1, M + 1)
        q = k.double() / M
        assert torch.equal(e.quantile(q), x)
        assert torch.equal(e.quantile(torch.nextafter(q[:-1], torch.tensor(2.0).double())), x[1:])
        assert torch.equal(e.quantile(e.cdf(x, "weak")), x)
    assert ECDF(normal(3, 5)).quantile(0.5).shape == (3,)
    assert ECDF(normal(5)).quantile([[0.5, 1.0]]).shape == (1, 2)
    assert ECDF(normal(5)).quantile(0).item() == normal(5).min()
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"expected probabilities in \[0, 1\]"):
            ECDF(normal(5)).quantile([0.5, wrong])
    with pytest.raises(ValueError, match=r"expected probabilities in .*, got 'median'"):
        ECDF(normal(5)).quantile("median")


@fuzz
@given(st.data())
def test_merge_equals_the_ecdf_of_all_samples(data):
    x, w, offsets, rows = data.draw(layouts())
    sizes = [len(row) for row in rows]
    more = [data.draw(st.integers(1, 5)) for _ in rows] if offsets is not None else [3] * len(rows)
    y = torch.tensor(data.draw(st.lists(numbers, min_size=sum(more), max_size=sum(more))), dtype=torch.float64).to(x)
    v = None if w is None else torch.ones(sum(more), dtype=torch.float64)
    if offsets is None:
        y, v = y.view(*x.shape[:-1], 3), None if v is None else v.view(*x.shape[:-1], 3)
        joined = [None if a is None else torch.cat((a, b), -1) for a, b in ((x, y), (w, v))]
        whole = ECDF(joined[0], weights=joined[1])
        ours = ECDF(x, weights=w).merge(ECDF(y, weights=v))
    else:
        pieces = [
            None
            if a is None
            else torch.cat([part for pair in zip(a.split(sizes), b.split(more), strict=True) for part in pair])
            for a, b in ((x, y), (w, v))
        ]
        total = offsets + offsets_of(more)
        whole = ECDF(pieces[0], weights=pieces[1], offsets=total)
        ours = ECDF(x, weights=w, offsets=offsets).merge(ECDF(y, weights=v, offsets=offsets_of(more)))
        assert torch.equal(ours.offsets, total)
    assert torch.equal(ours.samples, whole.samples)
    assert w is None or torch.equal(ours.weights, whole.weights)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: ECDF(normal(3).float()),
            r"ECDF\(4 samples, float64 on cpu\) and ECDF\(3 samples, float32",
        ),
        (lambda: ECDF(normal(2, 3)), "rows and weights must agree"),
        (lambda: ECDF(normal(3), offsets=torch.tensor([0, 3])), "1 ragged rows, 3 samples"),
        (lambda: ECDF(normal(3), weights=torch.ones(3)), "weighted"),
        (lambda: normal(3), "expected an ECDF to merge with, got Tensor"),
    ],
)
def test_merge_refuses(other, message):
    with pytest.raises(ValueError, match=message):
        ECDF(normal(4)).merge(other())


def test_invalid_samples_are_refused():
    with pytest.raises(ValueError, match=r"samples\[1\] is NaN"):
        ECDF(torch.tensor([1.0, math.nan]))
    with pytest.raises(ValueError, match="M >= 1"):
        ECDF(torch.empty(0))
    with pytest.raises(ValueError, match="row 1 of samples is empty"):
        ECDF(torch.ones(2), offsets=torch.tensor([0, 2, 2]))
    with pytest.raises(ValueError, match=r"weights\[0\] is -1"):
        ECDF(torch.ones(2), weights=-torch.ones(2))
    with pytest.raises(ValueError, match="queries: expected a tensor, got float"):
        ECDF(torch.ones(2)).cdf(1.0)


def test_inputs_are_copied():
    x, w, offsets = torch.arange(6.0), torch.ones(6), torch.tensor([0, 2, 6])
    kept = [ECDF(x), ECDF(x, weights=w), ECDF(x, weights=w, offsets=offsets)]
    before = [(e.samples.clone(), e.weights is None or e.weights.clone()) for e in kept]
    x.zero_(), w.zero_(), offsets.zero_()
    for e, (samples, weights) in zip(kept, before, strict=True):
        assert torch.equal(e.samples, samples)
        assert e.weights is None or torch.equal(e.weights, weights)
    assert kept[2].offsets.tolist() == [0, 2, 6]


# --- log F ------------------------------------------------------------------------------------------------------------


def test_log_cdf_and_add_half():
    e = ECDF(torch.tensor([3.0, 1.0, 1.0, 2.0]))
    q = torch.tensor([0.0, 1.0, 1.5, 3.0, 4.0])
    counts = torch.tensor([0, 0, 2, 3, 4], dtype=torch.float64)
    assert torch.equal(e.log_cdf(q, smoother=None), (counts / 4).log())
    torch.testing.assert_close(e.log_cdf(q), ((counts + 0.5) / 5).log(), rtol=1e-15, atol=0)
    torch.testing.assert_close(e.log_cdf(q, "weak")[1], torch.tensor(2.5 / 5).double().log())
    ragged = ECDF(torch.tensor([3.0, 1.0, 1.0, 2.0]), offsets=torch.tensor([0, 1, 4]))
    ours = ragged.log_cdf(torch.tensor([9.0, 1.5, 0.0]), query_offsets=torch.tensor([0, 1, 3]))
    torch.testing.assert_close(ours, torch.tensor([1.5 / 2, 2.5 / 4, 0.5 / 4]).double().log())
    doubled = ECDF(torch.tensor([3.0, 1.0, 1.0, 2.0]), weights=torch.full((4,), 2.0))
    torch.testing.assert_close(doubled.log_cdf(q), e.log_cdf(q), rtol=1e-14, atol=0)
    with pytest.raises(ValueError, match="smoother='add-one' is not known; expected None, 'add-half' or 'exponential'"):
        e.log_cdf(q, smoother="add-one")


def curve_fit(x, F, weights=None):
    """Fit -a e^{-b x} to the points with F > 0 by SciPy's least squares."""
    kept = F > 0
    sigma = None if weights is None else weights[kept] ** -0.5
    accuracy = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15, "maxfev": 10_000}
    start = (float(-np.log(F[kept]).mean()), 1.0 / float(np.ptp(x[kept])))
    model = lambda x, a, b: -a * np.exp(-b * x)  # noqa: E731
    (a, b), _ = scipy.optimize.curve_fit(model, x[kept], np.log(F[kept]), start, sigma=sigma, **accuracy)
    return lambda q: torch.from_numpy(model(q.numpy(), a, b))


@pytest.mark.parametrize("side", ["strict", "mid", "weak"])
def test_exponential_fit_equals_scipy(side):
    rows = torch.stack(
        [normal(60), normal(60, seed=1).exp(), 1e3 + normal(60, seed=2).round(), torch.rand(60).double()]
    )
    q = torch.stack([torch.linspace(float(row.min()) - 0.1, float(row.max()) + 1, 9).double() for row in rows])
    F = ecdf.ranks(rows, side)
    scipys = torch.stack(
        [curve_fit((x - x.min()).numpy(), f.numpy())(p - x.min()) for x, f, p in zip(rows, F, q, strict=True)]
    )
    torch.testing.assert_close(ECDF(rows).log_cdf(q, side, "exponential"), scipys, rtol=1e-5, atol=1e-8)
    one = ECDF(rows[0]).log_cdf(q[0].view(3, 3), side, "exponential")
    torch.testing.assert_close(one.flatten(), scipys[0], rtol=1e-5, atol=1e-8)
    sizes = [10, 60, 25, 40]
    parts = [row[:n] for row, n in zip(rows, sizes, strict=True)]
    ragged = ECDF(torch.cat(parts), offsets=offsets_of(sizes))
    ours = ragged.log_cdf(q.flatten(), side, "exponential", query_offsets=offsets_of([9] * 4)).view(4, 9)
    each = torch.stack([ECDF(x).log_cdf(p, side, "exponential") for x, p in zip(parts, q, strict=True)])
    torch.testing.assert_close(ours, each, rtol=1e-6, atol=1e-10)


def test_exponential_fit_has_gradient_0():
    """The derivatives of the sum of squares by a and b are 0."""
    x = normal(80, seed=5)
    fit = fit_exponential((x,), (ecdf.ranks(x, "mid"),), None)
    a, b = fit.a.requires_grad_(), fit.b.requires_grad_()
    squares = (ecdf.ranks(x, "mid").log() + a * torch.exp(-b * (x - fit.origin))).square().sum()
    assert all(grad.abs() < 1e-5 for grad in torch.autograd.grad(squares, (a, b)))


def test_exponential_fit_with_weights_and_infinities():
    x = normal(40).sort().values
    w = torch.randint(1, 4, (40,), generator=torch.Generator().manual_seed(3)).double()
    q = torch.linspace(-3, 3, 7).double()
    repeated = ECDF(x.repeat_interleave(w.long())).log_cdf(q, "weak", "exponential")
    torch.testing.assert_close(ECDF(x, weights=w).log_cdf(q, "weak", "exponential"), repeated, rtol=1e-6, atol=1e-10)
    ends = torch.tensor([-math.inf, math.inf]).double()
    with_ends = ECDF(torch.cat((x, ends[1:]))).log_cdf(q, "strict", "exponential")
    assert with_ends.isfinite().all()
    assert ECDF(x).log_cdf(ends, "strict", "exponential").tolist() == [-math.inf, 0]
    exact = ECDF(torch.tensor([0.0, 1.0, 2.0])).log_cdf(torch.tensor([1.0, 2.0]), "strict", "exponential")
    torch.testing.assert_close(exact, torch.tensor([1 / 3, 2 / 3]).double().log(), rtol=1e-7, atol=0)
    assert ECDF(torch.tensor([0.0, 1.0])).log_cdf(torch.tensor([0.5]), "weak", "exponential").isfinite().all()


def test_rows_that_cannot_be_fitted_are_named():
    rows = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 6.0]])
    with pytest.raises(ValueError, match="row 1: an exponential fit of log F needs two different"):
        ECDF(rows).log_cdf(rows, "strict", "exponential")


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_round_trip_bit_for_bit(tmp_path, dtype):
    x = normal(12).to(dtype)
    x[:3] = torch.tensor([0.0, -0.0, math.inf])
    w, offsets = torch.rand(12).double(), torch.tensor([0, 5, 12])
    for e in (ECDF(x), ECDF(x.view(2, 2, 3)), ECDF(x, weights=w), ECDF(x, weights=w, offsets=offsets)):
        e.save(tmp_path / "e.safetensors")
        back = ECDF.load(str(tmp_path / "e.safetensors"))
        assert repr(back) == repr(e)
        assert back.samples.view(torch.uint8).equal(e.samples.view(torch.uint8))
        assert e.weights is None or torch.equal(back.weights, e.weights)
        assert e.offsets is None or torch.equal(back.offsets, e.offsets)
    assert [path.name for path in tmp_path.iterdir()] == ["e.safetensors"]


def test_other_files_are_refused(tmp_path):
    path, ours = tmp_path / "x", {"format": "nlgrpo.ecdf", "version": "1"}
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(ValueError, match="is not an ECDF file"):
        ECDF.load(path)
    save_file({"samples": torch.ones(3)}, path)
    with pytest.raises(ValueError, match=r"expected .*nlgrpo\.ecdf.* in its header, got None"):
        ECDF.load(path)
    save_file({"weights": torch.ones(3)}, path, metadata=ours)
    with pytest.raises(ValueError, match="is not an ECDF file"):
        ECDF.load(path)
    save_file({"samples": torch.tensor([2.0, 1.0])}, path, metadata=ours)
    with pytest.raises(ValueError, match="not sorted"):
        ECDF.load(path)
    save_file({"samples": torch.tensor([2.0, math.nan])}, path, metadata=ours)
    with pytest.raises(ValueError, match="NaN"):
        ECDF.load(path)
    with pytest.raises(FileNotFoundError):
        ECDF.load(tmp_path / "absent")


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "e"
    ECDF(torch.ones(3)).save(path)
    before = path.read_bytes()

    def broken(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(ecdf, "save_file", broken)
    with pytest.raises(OSError, match="no space"):
        ECDF(torch.zeros(5)).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_repr_and_to():
    e = ECDF(normal(7).bfloat16(), weights=torch.ones(7), offsets=torch.tensor([0, 3, 7]))
    assert repr(e) == "ECDF(2 ragged rows, 7 samples, weighted, bfloat16 on cpu)"
    assert repr(ECDF(normal(3, 4))) == "ECDF(3x4 samples, float64 on cpu)"
    assert repr(e.to("cpu")) == repr(e)
    assert e.to("meta").samples.device.type == "meta"
    assert ECDF(normal(3)).all_reduce().samples.tolist() == normal(3).sort().values.tolist()  # no process group


# --- Kolmogorov and Smirnov -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:divide by zero")  # in SciPy, for two samples
@pytest.mark.parametrize("method", ["exact", "asymp", "auto"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 9), (5, 5), (7, 3), (40, 40), (60, 45), (200, 299), (800, 800)])
def test_ks_test_equals_scipy(method, m, n):
    for seed, shift in enumerate((0.0, 0.1, 1.0, 5.0)):
        a, b = normal(m, seed=seed), normal(n, seed=seed + 100) + shift
        if seed % 2:
            a, b = (a * 4).round(), (b * 4).round()
        theirs = scipy.stats.ks_2samp(a.numpy(), b.numpy(), method=method)
        distance, p = ks_test(a, b, method)
        assert distance.shape == p.shape == ()
        assert abs(distance.item() - theirs.statistic) < 1e-15
        if (m, n, method) == (1, 1, "asymp"):
            assert p.item() == 1  # NaN in SciPy
        else:
            assert p.item() == pytest.approx(theirs.pvalue, rel=1e-9, abs=1e-300)


def test_ks_auto_is_asymptotic_for_many_samples():
    a, b = normal(10_001), normal(50, seed=1)
    distance, p = ks_test(a, b)
    assert p.item() == pytest.approx(scipy.stats.ks_2samp(a.numpy(), b.numpy()).pvalue, rel=1e-9)
    assert torch.equal(p, ks_test(a, b, "asymp")[1])
    assert not torch.equal(p, ks_test(a, b, "exact")[1])
    assert distance.item() == ks_distance(ECDF(a), b).item()


def test_ks_row_by_row():
    a, b = (normal(2, 3, 30) * 2).round(), (normal(2, 3, 20, seed=1) * 2).round()
    distance, p = ks_test(a, b)
    assert distance.shape == p.shape == (2, 3)
    truth = [scipy.stats.ks_2samp(x.numpy(), y.numpy()) for x, y in zip(a.view(6, 30), b.view(6, 20), strict=True)]
    np.testing.assert_allclose(distance.flatten(), [t.statistic for t in truth], rtol=0, atol=1e-15)
    np.testing.assert_allclose(p.flatten(), [t.pvalue for t in truth], rtol=1e-9)
    sizes = [5, 30, 12]
    x, y = normal(47).round(), normal(60, seed=1).round()
    ragged = ks_test(ECDF(x, offsets=offsets_of(sizes)), ECDF(y, offsets=offsets_of([20, 20, 20])))
    truth = [scipy.stats.ks_2samp(u.numpy(), v.numpy()) for u, v in zip(x.split(sizes), y.split(20), strict=True)]
    np.testing.assert_allclose(ragged[0], [t.statistic for t in truth], rtol=0, atol=1e-15)
    np.testing.assert_allclose(ragged[1], [t.pvalue for t in truth], rtol=1e-9)


@fuzz
@given(layouts(), st.data())
def test_ks_distance_is_the_largest_gap(layout, data):
    x, w, offsets, rows = layout
    more = [data.draw(st.integers(1, 5)) for _ in rows] if offsets is not None else [3] * len(rows)
    y = torch.tensor(data.draw(st.lists(numbers, min_size=sum(more), max_size=sum(more))), dtype=torch.float32)
    others = [[(v, 1.0) for v in part.tolist()] for part in y.split(more)]
    if offsets is None:
        b = ECDF(y.view(*x.shape[:-1], 3))
    else:
        b = ECDF(y, offsets=offsets_of(more))
    ours = ks_distance(ECDF(x, weights=w, offsets=offsets), b)
    truth = [
        max(abs(weak(row, v) - weak(other, v)) for v, _ in [*row, *other])
        for row, other in zip(rows, others, strict=True)
    ]
    np.testing.assert_allclose(ours.flatten(), truth, rtol=0, atol=1e-14)
    if w is not None:
        with pytest.raises(ValueError, match="no p-value is known for weighted samples"):
            ks_test(ECDF(x, weights=w, offsets=offsets), b)


def test_ks_refuses():
    with pytest.raises(ValueError, match="expected the same number of rows, both dense or both ragged"):
        ks_distance(normal(3), normal(2, 3))
    with pytest.raises(ValueError, match="method='best' is not known; expected 'auto', 'exact' or 'asymp'"):
        ks_test(normal(3), normal(3), "best")
    with pytest.raises(ValueError, match="is NaN"):
        ks_distance(torch.tensor([math.nan]), normal(3))
