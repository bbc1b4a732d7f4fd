"""Runs a model's chat template, which is untrusted code, with limits on run time and value size."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trainer.contract.errors import UserError, first_line

# The time limit, in seconds. A template normally takes milliseconds, but a faulty template may loop forever.
_LIMIT_S = 3.0
# Operators in a template may return integers of at most `_MOST_BITS` bits, and strings or lists of at most
# `_MOST_ENTRIES` entries. Integer arguments of filters and methods, such as a width, may be at most
# `_LARGEST_ARGUMENT`.
_MOST_BITS, _MOST_ENTRIES, _LARGEST_ARGUMENT = 1 << 16, 1 << 24, 10**6
_HUGE = "it creates a huge number or string"


def chat_ids(tokenizer: Any, messages: Any, *, prompts: bool = False) -> list[int]:
    """Return a chat's token ids; raise `UserError` if the chat template is missing, fails or takes too long.

    With `prompts`, the ids end with the beginning of the assistant's next message.
    """
    if tokenizer.chat_template is None:
        raise UserError("text.column: contains chats, but the model's tokenizer has no chat template")
    _bound_templates()
    try:
        with ended_after(_LIMIT_S):
            how = {"tokenize": True, "return_dict": False, "add_generation_prompt": prompts}
            return list(tokenizer.apply_chat_template(messages, **how))
    except TookTooLong:
        message = f"the model's chat template takes more than {_LIMIT_S:g} s for a chat; use another template"
        raise UserError(f"text.column: {message}") from None
    except Exception as error:
        # A template may raise any exception.
        message = f"the model's chat template rejects a chat: {first_line(error)}; remove this chat"
        raise UserError(f"text.column: {message}") from None


@functools.cache
def _bound_templates() -> None:
    """Make transformers run chat templates in a sandbox that refuses huge values.

    A value such as 9**9**9 is computed in a single C call, which a time limit cannot interrupt.
    """
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%", "//"))

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.filters = {name: self._bounded(one) for name, one in self.filters.items()}

        @staticmethod
        def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
            # Skip the filtered value, and the context argument that Jinja passes to some filters.
            n_before = 1 + hasattr(function, "jinja_pass_arg")

            @functools.wraps(function)
            def bounded(*arguments: Any, **named: Any) -> Any:
                if _are_huge((*arguments[n_before:], *named.values())):
                    raise SecurityError(_HUGE)
                return function(*arguments, **named)

            return bounded

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _makes_huge(operator, left, right):
                raise SecurityError(_HUGE)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __function: Any, *arguments: Any, **named: Any) -> Any:
            is_method = isinstance(getattr(__function, "__self__", None), str | bytes | int)
            if is_method and _are_huge((*arguments, *named.values())):
                raise SecurityError(_HUGE)
            return super().call(__context, __function, *arguments, **named)

    vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = Bounded


def _are_huge(arguments: Iterable[Any]) -> bool:
    return any(isinstance(one, int) and abs(one) > _LARGEST_ARGUMENT for one in arguments)


def _makes_huge(operator: str, left: Any, right: Any) -> bool:
    """Return whether an operator's result would be huge, or slow to compute because of a huge operand."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length(), right.bit_length()
        return (bits[0] * max(right, 0) if operator == "**" else sum(bits)) > _MOST_BITS
    if operator == "*" and isinstance(left, int):
        left, right = right, left
    if not isinstance(left, str | bytes | list | tuple):
        return False
    if operator == "%":  # a format string with a large width
        return isinstance(left, str) and bool(re.search(r"%[^%a-zA-Z]*(\*|\d{7})", left))
    if isinstance(right, int):
        return len(left) * right > _MOST_ENTRIES
    return isinstance(right, str | bytes | list | tuple) and len(left) + len(right) > _MOST_ENTRIES


class TookTooLong(BaseException):
    """Raised when code exceeds its time limit; a `BaseException`, because the code may catch every `Exception`."""


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the body of the `with` statement if the body runs for longer than `seconds`.

    The exception is raised before the next Python instruction, so a call to C code is not interrupted. Signals are not
    an option, because Python handles them only in the main thread.
    """
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # Once `is_over` is set under the lock, the timer can no longer raise the exception.
        with lock:
            is_over = True
