"""Policies to keep as text, such as `KeepLast(2) | KeepEvery(1000)`, for files of settings and options of commands."""

from __future__ import annotations

import ast
import dataclasses
import math
from numbers import Integral, Real
from typing import Any

from dcp_io.roots.keeping_rules import KeepAll, KeepAny, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy

__all__ = ["parse_policy", "policy_text"]

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast)}


def policy_text(policy: KeepPolicy) -> str:
    """Return a policy as text that `parse_policy` reads.

    Raises:
        ValueError: The policy is of a class of your own, which another process could not read.
    """
    if isinstance(policy, KeepAny):
        return " | ".join(map(policy_text, policy.policies))
    if type(policy) not in _KINDS.values():
        raise ValueError(
            f"{type(policy).__name__} cannot be written as text, which another process reads; combine "
            f"{', '.join(_KINDS)} with |"
        )
    values: Any = policy  # a dataclass, as all in the table
    arguments = (_literal(getattr(values, field.name)) for field in dataclasses.fields(values))
    return f"{type(policy).__name__}({', '.join(arguments)})"


def _literal(value: Any) -> str:
    """Return a number or text as Python writes it, also one of another library, or an infinite one."""
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return "1e999" if math.isinf(value) else repr(float(value))
    return repr(str(value))


def parse_policy(text: str) -> KeepPolicy:
    """Parse a policy, written as in Python: calls of the classes of this package, combined with `|`. Nothing is run.

    Raises:
        ValueError: The text is not such a policy.

    Example:
        ```python
        from dcp_io import KeepEvery, KeepLast, parse_policy

        assert parse_policy("KeepLast(2) | KeepEvery(1000)") == KeepLast(2) | KeepEvery(1000)
        ```
    """
    try:
        return _policy(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{text!r} is not a policy to keep ({error}); write one such as 'KeepLast(2) | KeepEvery(1000)', from "
            f"{', '.join(_KINDS)}"
        ) from error


def _policy(node: ast.expr) -> KeepPolicy:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _policy(node.left) | _policy(node.right)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _KINDS:
        raise ValueError("unknown policy")
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    found: KeepPolicy = _KINDS[node.func.id](*map(ast.literal_eval, node.args), **named)
    return found
