"""What to do about an operation that leaves the range in which it is defined."""

from __future__ import annotations

_ADVICE = {
    "log": "keep its input above 0: torch.log(x.clamp(min=eps)), or compute in log space (log_softmax, logsigmoid).",
    "log2": "keep its input above 0: clamp it to an eps.",
    "log10": "keep its input above 0: clamp it to an eps.",
    "log1p": "keep its input above -1: clamp it.",
    "div": "keep the divisor away from 0: add an eps, or leave out what would be divided by 0.",
    "reciprocal": "keep its input away from 0: add an eps.",
    "sqrt": "keep its input above 0: torch.sqrt(x + eps). At 0 its derivative is infinite.",
    "rsqrt": "keep its input above 0: torch.rsqrt(x + eps).",
    "pow": "keep its base away from 0 for exponents below 1, and small for large exponents.",
    "linalg_vector_norm": "keep it away from 0, where its derivative is not defined: add an eps to what it takes.",
    "acos": "keep its input within -1 and 1: clamp it to -1 + eps and 1 - eps.",
    "asin": "keep its input within -1 and 1: clamp it to -1 + eps and 1 - eps.",
    "atanh": "keep its input within -1 and 1: clamp it to -1 + eps and 1 - eps.",
    "exp": "keep its input small: subtract the largest value first (logsumexp, softmax), or clamp it.",
    "softmax": "a row of its input is -inf throughout: let each row's mask leave at least one position.",
    "log_softmax": "a row of its input is -inf throughout: let each row's mask leave at least one position.",
    "nll_loss_forward": "every target is ignored, so that it takes the mean of nothing: skip such batches.",
    "nll_loss2d_forward": "every target is ignored, so that it takes the mean of nothing: skip such batches.",
    "mean": "it takes the mean of nothing: skip empty selections.",
    "var": "it takes the variance of too few values: at least two are needed, or correction=0.",
    "std": "it takes the deviation of too few values: at least two are needed, or correction=0.",
    "native_batch_norm": "look at its variance: a batch of one value per channel has none.",
}
_IN_BACKWARD = {
    "std": "its derivative is not defined where all values are the same: add noise or an eps, or skip such rows.",
    "pow": "its derivative is infinite at 0 for exponents below 1: add an eps to its input.",
    "norm": "its derivative is not defined at 0: add an eps to what it takes.",
}


def advice_for(operation: str, of_forward: str) -> str:
    """What to do about an operation, named as ``"aten.log"``; of_forward: what it is the backward of."""
    name = _short(of_forward or operation)
    found = (_IN_BACKWARD.get(name) if of_forward else None) or _ADVICE.get(name) or _ADVICE.get(_short(operation))
    return found or "keep what it takes in the range where it is defined, or leave out the samples that are not."


def _short(operation: str) -> str:
    return operation.rpartition(".")[2].removesuffix("_").removeprefix("_")
