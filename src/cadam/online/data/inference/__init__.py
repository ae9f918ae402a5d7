"""Schema inference: which columns of a sample are features, labels, users and times."""

from .infer import infer_schema, take_sample
from .report import CannotInferError, ColumnDecision, InferredSchema
from .roles import ColumnOptions

__all__ = ["CannotInferError", "ColumnDecision", "ColumnOptions", "InferredSchema", "infer_schema", "take_sample"]
