"""GAUC: the AUC within each user, averaged over users (https://arxiv.org/abs/1706.06978, section 6.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..data.events import Array
from .metric import WindowMetric


@dataclass(frozen=True)
class UserAuc:
    """The AUC of every user who has events of both classes."""

    users: Array
    auc: Array
    impressions: Array
    """The number of events of each of these users."""
    one_class: int
    """The number of users without an AUC, because all their labels are the same."""
    one_class_impressions: int
    """The number of events of the users without an AUC."""

    @property
    def by_impressions(self) -> float:
        """The mean AUC, weighted by the number of events of each user. This is the paper's GAUC."""
        return float(self.auc @ self.impressions / self.impressions.sum()) if len(self.auc) else math.nan

    @property
    def by_user(self) -> float:
        """The mean AUC, with equal weights for all users."""
        return float(self.auc.mean()) if len(self.auc) else math.nan


def user_auc(scores: Array, labels: Array, users: Array) -> UserAuc:
    """Compute the AUC within each user exactly; ties count half.

    User, rank of the score and label of an event are packed into one integer. Sorting these integers puts the events
    of a user in order, and cumulative counts along the order give twice the number of correctly ordered pairs as an
    integer. All values are nan if a score is nan.

    Args:
        scores: the predictions; only their order matters.
        labels: 0 or 1.
        users: integers or strings; integers are faster.

    Raises:
        ValueError: if the arrays differ in length, or if there are 2**31 events or more.
    """
    score, label, user = np.asarray(scores), np.asarray(labels, dtype=bool), np.asarray(users)
    if not score.shape == label.shape == user.shape or score.ndim != 1:
        raise ValueError(
            f"scores, labels and users must have the same length, got shapes {score.shape}, {label.shape}, {user.shape}"
        )
    if len(score) == 0:
        return UserAuc(user, np.empty(0), np.empty(0, dtype=np.int64), 0, 0)
    if len(score) >= 2**31:
        raise ValueError(f"at most 2**31 - 1 events are supported at once, got {len(score)}")
    decode_users, user_code = _encode_users(user)
    key = (user_code << 32) | (_ranks(score) << 1) | label
    key.sort()
    # A tie is a run of events of one user with equal scores.
    tie_start = _run_starts(key >> 1)
    user_start = _run_starts(key[tie_start] >> 32)
    positives = np.add.reduceat(key & 1, tie_start)
    negatives = np.diff(tie_start, append=len(key)) - positives
    negatives_below = np.cumsum(negatives) - negatives
    negatives_below -= np.repeat(negatives_below[user_start], np.diff(user_start, append=len(tie_start)))
    doubled_pairs = np.add.reduceat(positives * (2 * negatives_below + negatives), user_start)
    positives, negatives = np.add.reduceat(positives, user_start), np.add.reduceat(negatives, user_start)
    has_both = (positives > 0) & (negatives > 0)
    impressions = positives + negatives
    value = doubled_pairs[has_both] / (2 * positives[has_both] * negatives[has_both])
    if np.isnan(score).any():
        value = np.full_like(value, math.nan)
    names = decode_users(key[tie_start[user_start]] >> 32)
    return UserAuc(
        users=names[has_both],
        auc=value,
        impressions=impressions[has_both],
        one_class=int((~has_both).sum()),
        one_class_impressions=int(len(score) - impressions[has_both].sum()),
    )


def _ranks(score: Array) -> Array:
    """Return the rank of each score among the distinct scores, from 0."""
    order = np.argsort(score)
    ordered = score[order]
    ranks = np.empty(len(score), dtype=np.int64)
    ranks[order] = np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])
    return ranks


def _run_starts(values: Array) -> Array:
    """Return the positions at which runs of equal values begin."""
    starts: Array = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
    return starts


def _encode_users(user: Array) -> tuple[Callable[[Array], Array], Array]:
    """Return users as integers below 2**31, and the function that converts such integers back to users."""
    if user.dtype.kind in "iu":
        low, high = int(user.min()), int(user.max())
        if high - low < 2**31:
            return lambda code: (code + low).astype(user.dtype), (user - user.dtype.type(low)).astype(np.int64)
    names, code = np.unique(user, return_inverse=True)
    return lambda code: names[code], code.astype(np.int64)


def _compute(scores: Array, labels: Array, users: Array | None) -> dict[str, float]:
    assert users is not None
    within = user_auc(scores, labels, users)
    return {
        "gauc_by_impressions": within.by_impressions,
        "gauc_by_user": within.by_user,
        "users_of_both_classes": float(len(within.users)),
        "users_of_one_class": float(within.one_class),
    }


GAUC = WindowMetric(
    outputs={
        "gauc_by_impressions": "mean AUC within users, weighted by their events",
        "gauc_by_user": "mean AUC within users, with equal weights",
        "users_of_both_classes": "users with labels of both classes",
        "users_of_one_class": "users with labels of one class, who have no AUC",
    },
    averaged=("gauc_by_impressions", "gauc_by_user"),
    compute=_compute,
    needs_users=True,
)
