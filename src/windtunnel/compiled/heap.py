"""Priority queues over arrays: a binary heap of (key, value) pairs, and many meldable queues that share two arrays."""

from windtunnel.compiled.jit import inner


@inner
def push(keys, values, size, key, value):
    """Put (key, value) on the binary min-heap in `keys[:size]`, `values[:size]`; returns the new size.

    Equal keys leave in the order of their values.
    """
    child = size
    while child > 0:
        parent = (child - 1) // 2
        if keys[parent] < key or (keys[parent] == key and values[parent] <= value):
            break
        keys[child], values[child] = keys[parent], values[parent]
        child = parent
    keys[child], values[child] = key, value
    return size + 1


@inner
def pop(keys, values, size):
    """Remove the least pair of the binary heap (read it at index 0 first); returns the new size."""
    size -= 1
    key, value = keys[size], values[size]
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            keys[right] < keys[child] or (keys[right] == keys[child] and values[right] < values[child])
        ):
            child = right
        if key < keys[child] or (key == keys[child] and value <= values[child]):
            break
        keys[parent], values[parent] = keys[child], values[child]
        parent = child
    keys[parent], values[parent] = key, value
    return size


@inner
def meld(key, left, right, a, b):
    """Join two skew heaps (Sleator and Tarjan, 1986) given by their roots, -1 for empty; returns the root.

    An item is an index into `key`, `left` and `right` and lies in one heap at most, so any number of queues share the
    three arrays. Amortised O(log n). Equal keys leave in the order of their indices.
    """
    if a < 0:
        return b
    if b < 0:
        return a
    if key[b] < key[a] or (key[b] == key[a] and b < a):
        a, b = b, a
    root = a
    while True:
        onward = right[a]
        right[a] = left[a]
        if onward < 0:
            left[a] = b
            return root
        if key[b] < key[onward] or (key[b] == key[onward] and b < onward):
            onward, b = b, onward
        left[a] = onward
        a = onward
