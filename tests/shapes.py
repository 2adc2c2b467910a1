"""The checker of shapes in annotations that jaxtyping calls in tests. Other annotations are mypy's."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import UnionType
from typing import Any, get_args

from jaxtyping import AbstractArray


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises `TypeError` for an argument or a result of another dtype or shape than is annotated."""
    declared = signature(function)
    types = {name: parameter.annotation for name, parameter in declared.parameters.items()}
    arguments = {name: kind for name, kind in types.items() if has_shape(kind)}
    result = declared.return_annotation

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = declared.bind(*args, **kwargs).arguments
        for name, kind in arguments.items():
            if name in values and not isinstance(values[name], kind):
                raise TypeError(f"{name} is no {kind}")
        returned = function(*args, **kwargs)
        if has_shape(result) and not isinstance(returned, result):
            raise TypeError(f"the result is no {result}")
        return returned

    return checked


def has_shape(kind: Any) -> bool:
    """Whether a type is an array with a shape, or may be one."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return any(isinstance(each, type) and issubclass(each, AbstractArray) for each in kinds)
