"""Tasks on all processors, such as programs to compile."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


def in_threads(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield what tasks return, in their order, each as soon as it is there.

    Each has the caller's context variables. Compilers run beside one another: they do not hold
    Python's lock.

    Example:
        >>> list(in_threads([lambda: 1, lambda: 2]))
        [1, 2]
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(copy_context().run, task) for task in tasks]
        for future in futures:
            yield future.result()
