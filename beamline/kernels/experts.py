"""Routing: which experts a row goes to, and the sum of what they make of it."""

from typing import Any

import numpy as np

from beamline.kernels.arithmetic import rounded, sigmoid
from beamline.kernels.compiled import kernel

_LOWEST = np.float32(-np.inf)


@kernel
def route(
    scores: Any, bias: Any, groups: int, best_groups: int, normalize: bool, replayed: bool, chosen: Any, weights: Any,
) -> None:  # fmt: skip
    """Beam's router on logits ``scores [rows, E]``, which become sigmoids: experts ``[rows, K]`` and their weights.

    Weights are scores without bias, over their sum. With ``replayed`` the experts are given, else they are chosen.
    """
    for i in range(len(scores)):
        for e in range(scores.shape[1]):
            scores[i, e] = sigmoid(scores[i, e])
    if not replayed:
        choose(scores, bias, groups, best_groups, chosen)
    weigh(scores, chosen, normalize, weights)


@kernel
def choose(scores: Any, bias: Any, groups: int, best_groups: int, chosen: Any) -> None:
    """The experts ``[rows, K]`` that Beam's router chooses by their scores ``[rows, E]``.

    A group of experts is judged by the sum of its 2 best choices (score + bias); the best groups stay, and of their
    experts the K best, best first. Of equal ones the first wins.
    """
    E, K = scores.shape[1], chosen.shape[1]
    size = E // groups
    choice, by_group = np.empty(E, np.float32), np.empty(groups, np.float32)
    for i in range(len(scores)):
        for e in range(E):
            choice[e] = scores[i, e] + bias[e]
        for g in range(groups):
            best, second = _LOWEST, _LOWEST
            for e in range(g * size, (g + 1) * size):
                if choice[e] > best:
                    best, second = choice[e], best
                elif choice[e] > second:
                    second = choice[e]
            by_group[g] = best + second
        for _ in range(groups - best_groups):
            worst = groups - 1
            for g in range(groups - 1, -1, -1):
                if by_group[g] < by_group[worst]:
                    worst = g
            by_group[worst] = np.inf
            choice[worst * size : (worst + 1) * size] = _LOWEST
        for k in range(K):
            best_expert = 0
            for e in range(E):
                if choice[e] > choice[best_expert]:
                    best_expert = e
            chosen[i, k] = best_expert
            choice[best_expert] = _LOWEST


@kernel
def weigh(scores: Any, chosen: Any, normalize: bool, weights: Any) -> None:
    """Weights of the chosen experts: their scores, over their sum + 1e-20 if normalized."""
    K = chosen.shape[1]
    for i in range(len(chosen)):
        total = np.float32(0)
        for k in range(K):
            total += scores[i, chosen[i, k]]
        for k in range(K):
            score = scores[i, chosen[i, k]]
            weights[i, k] = score / (total + np.float32(1e-20)) if normalize else score


@kernel
def first_fault(routes: Any, experts: int) -> Any:
    """The first of the choices ``[rows, L, K]`` that no router makes, as (row, layer, k); -1s when all are possible.

    It is an expert that does not exist, or one that its row has chosen in this layer already.
    """
    rows, layers, K = routes.shape
    chosen_in = np.zeros(experts, np.int64)  # by expert: the last row and layer, counted from 1
    for i in range(rows):
        for j in range(layers):
            for k in range(K):
                e = routes[i, j, k]
                if e >= experts or chosen_in[e] == i * layers + j + 1:
                    return i, j, k
                chosen_in[e] = i * layers + j + 1
    return -1, -1, -1


@kernel
def sort_by_expert(chosen: Any, ends: Any, order: Any) -> None:
    """Choices ``row * K + k`` in the order of their experts: expert e has ``order[ends[e - 1]:ends[e]]``."""
    K = chosen.shape[1]
    ends[:] = 0
    for i in range(len(chosen)):
        for k in range(K):
            ends[chosen[i, k]] += 1
    total = 0
    for e in range(len(ends)):
        total, ends[e] = total + ends[e], total
    for i in range(len(chosen)):
        for k in range(K):
            e = chosen[i, k]
            order[ends[e]] = i * K + k
            ends[e] += 1


@kernel
def invert(order: Any, place: Any) -> None:
    """``place[order[p]] = p``: where each choice stands among the sorted ones."""
    for p in range(len(order)):
        place[order[p]] = p


@kernel
def gather_experts(outer: Any, place: Any, weights: Any, factor: float, y: Any, bf16: bool) -> None:
    """``y[i] = factor * sum_k weights[i, k] * outer[place[i, k]]``, summed over a row's choices in their order.

    ``place`` is flat, ``[rows * K]``.
    """
    K, D = weights.shape[1], y.shape[1]
    for i in range(len(y)):
        total = y[i]
        for k in range(K):
            part, weight = outer[place[i * K + k]], weights[i, k]
            if k == 0:
                for j in range(D):
                    total[j] = part[j] * weight
            else:
                for j in range(D):
                    total[j] = total[j] + part[j] * weight
        for j in range(D):
            total[j] = rounded(rounded(total[j], bf16) * np.float32(factor), bf16)
