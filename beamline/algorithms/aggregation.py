"""What the losses of tokens are averaged over, as the weight of every token: the loss itself is then a plain sum."""

import numpy as np
from numpy.typing import NDArray

from beamline.config.algorithm import Aggregation


def token_weights(
    aggregation: Aggregation, tokens_B: NDArray[np.int64], group_B: NDArray[np.int64], limit: int
) -> NDArray[np.float64]:
    """Weight of each token of each of B sequences ``[B]``, fp64; 0 for a sequence without tokens, which counts nowhere.

    ``tokens_B`` are the tokens of each sequence that count, ``group_B`` says whose problem it is an answer to, and
    ``limit`` is the most tokens that a response may have. With S sequences and P problems that have tokens:

    - ``token_mean``: 1 / (all tokens). DAPO's token-level loss, arXiv 2503.14476, section 3.3, over all problems of
      the mini-batch.
    - ``sequence_mean_token_mean``: 1 / (S x tokens of the sequence). GRPO, arXiv 2402.03300, equation 3.
    - ``sequence_sum``: 1 / (S x limit). Dr. GRPO, arXiv 2503.20783, section 3.2; the limit is a constant that keeps
      the scale of a mean.
    - ``prompt_mean``: 1 / (P x tokens of all responses to the problem). ScaleRL, arXiv 2510.13786, section 3.2; it is
      equation 8 of DAPO as written, with the expectation over problems outside.
    """
    counted = tokens_B > 0
    sequences = np.count_nonzero(counted)
    if aggregation == "token_mean":
        shares = np.full(len(tokens_B), tokens_B.sum())
    elif aggregation == "sequence_mean_token_mean":
        shares = sequences * tokens_B
    elif aggregation == "sequence_sum":
        shares = np.full(len(tokens_B), sequences * limit)
    else:
        problems, problem_B = np.unique(group_B, return_inverse=True)
        of_problem = np.bincount(problem_B, weights=tokens_B, minlength=len(problems))
        shares = np.count_nonzero(of_problem) * of_problem[problem_B]
    weights_B = np.zeros(len(tokens_B))
    weights_B[counted] = 1.0 / shares[counted]
    return weights_B
