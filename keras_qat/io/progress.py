"""Progress of long work, shown as Keras shows it: with the time that is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

from keras_qat.frontend.keras2.backend import keras

__all__ = ["shown"]

_Item = TypeVar("_Item")


def shown(
    items: Iterable[_Item],
    what: str,
    verbose: int,
    total: int | None = None,
    unit: str = "batch",
) -> Iterator[_Item]:
    """The items, one for each batch; with `verbose` a bar of how many there were.

    Args:
        items: what there is to do.
        what: what is done with them, a few words.
        verbose: 0 for silence.
        total: how many items there are, where they do not know.
        unit: what an item is.
    """
    if not verbose:
        yield from items
        return
    print(what)
    count = len(items) if isinstance(items, Sized) else total
    bar: Any = keras.utils.Progbar(count, unit_name=unit)
    done = 0
    for done, item in enumerate(items, start=1):
        yield item
        bar.update(done, finalize=done == count)
    if done != count:
        bar.update(done, finalize=True)
