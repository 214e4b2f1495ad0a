"""Compute the statistics of a run under many resamples of its requests at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dovetail.experiment.samples import Floats, Ints, Metric, Sample

Weights = NDArray[np.float32]

_BINS = 256


def draw(clusters: Ints, resamples: int, seed: int) -> Weights:
    """Return how often each request is drawn [resamples, requests]. Clusters are drawn with replacement, each with all its requests.

    The number of clusters drawn is one less than their number, which makes the bootstrap's variance unbiased for few clusters (Rao
    and Wu 1988). Drawing requests again inside the drawn clusters would count their noise twice (Davison and Hinkley 1997, section
    3.8). If all requests are in one cluster, requests are drawn individually.
    """
    _, inverse = np.unique(clusters, return_inverse=True)
    count = int(inverse.max()) + 1
    if count == 1:
        inverse, count = np.arange(len(clusters)), len(clusters)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(max(count - 1, 1), np.full(count, 1 / count), size=resamples)
    return drawn[:, inverse].astype(np.float32)


def statistic(metric: Metric, sample: Sample) -> float:
    """Return the metric of the run itself, or nan if there is no value."""
    if metric.kind == "rate":
        return float(sample.values.sum() / sample.seconds)
    if not len(sample.values):
        return float("nan")
    return float(sample.values.mean() if metric.kind == "mean" else np.quantile(sample.values, metric.q))


def resampled(metric: Metric, sample: Sample, weights: Weights) -> Floats:
    """Return the metric for each row of ``weights`` [resamples]. Rates are computed per request, because the number of drawn requests
    varies. A resample without a value gets the value of the run itself."""
    requests = weights.shape[1]
    if metric.kind == "quantile":
        found = _quantiles(sample, weights, metric.q)
    else:
        total = weights @ np.bincount(sample.owners, sample.values, requests).astype(np.float32)
        owners = np.bincount(sample.owners, minlength=requests) if metric.kind == "mean" else np.ones(requests)
        found = total / np.maximum(weights @ owners.astype(np.float32), 1e-9)
        found = found * (requests / sample.seconds) if metric.kind == "rate" else found
    return np.where(found > 0, found, statistic(metric, sample)).astype(np.float64)


def _quantiles(sample: Sample, weights: Weights, q: float) -> Floats:
    """Return quantiles by counting each request's values per bin. Bins end at values of the sample and are finer around the quantile."""
    ordered = np.sort(sample.values)
    shares = np.concatenate(
        [np.linspace(0, 1, _BINS // 2), np.linspace(max(q - 0.08, 0), min(q + 0.08, 1), _BINS // 2)]
    )
    edges = ordered[np.unique(np.round(shares * (len(ordered) - 1)).astype(np.int64))]
    edges = np.unique(edges)
    bins = np.searchsorted(edges, sample.values)
    flat = np.bincount(sample.owners * len(edges) + bins, minlength=weights.shape[1] * len(edges))
    below = weights @ np.cumsum(flat.reshape(weights.shape[1], len(edges)), axis=1).astype(np.float32)
    place = (below < q * below[:, -1:]).sum(axis=1)
    return np.where(below[:, -1] > 0, edges[np.minimum(place, len(edges) - 1)], 0.0)
