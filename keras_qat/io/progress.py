"""Shows the progress of long work with Keras' progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from keras_qat.keras2.backend import keras

_Item = TypeVar("_Item")


def show_progress(
    items: Iterable[_Item],
    title: str,
    verbose: int,
    total: int | None = None,
    unit: str = "batch",
) -> Iterator[_Item]:
    """Yields the items; with `verbose`, shows a bar of how many were done.

    Args:
        items: the items, one for each unit of work.
        title: title of the bar, a few words.
        verbose: 0 for no bar.
        total: number of items, if they have no length.
        unit: name of an item.
    """
    if not verbose:
        yield from items
        return
    print(title)
    count = len(items) if isinstance(items, Sized) else total
    bar: Any = keras.utils.Progbar(count, unit_name=unit)
    done = 0
    for done, item in enumerate(items, start=1):
        yield item
        bar.update(done, finalize=done == count)
    if done != count:
        bar.update(done, finalize=True)
