"""Doubly linked lists in record arrays: items with `before` and `after`, and a record with the ends `first` and `last`.

-1 stands for nobody.
"""

from windtunnel.compiled.jit import inner


@inner
def append(items, ends, i):
    """Put item `i` at the end of a list."""
    last = ends.last
    items[i].before = last
    items[i].after = -1
    if last == -1:
        ends.first = i
    else:
        items[last].after = i
    ends.last = i


@inner
def remove(items, ends, i):
    """Take item `i` out of its list."""
    before, after = items[i].before, items[i].after
    if before == -1:
        ends.first = after
    else:
        items[before].after = after
    if after == -1:
        ends.last = before
    else:
        items[after].before = before
