"""Changes of one value in a file of torch.save: below the keys that lead to it, to a new value, GONE, Add(...) or Apply(...)."""
import torch

GONE = object()
SPARSE = torch.eye(3).to_sparse()


class Add:
    """Adds members to the dict that is there."""

    def __init__(self, members):
        self.members = members


class Apply:
    """Replaces a value by a function of it."""

    def __init__(self, function):
        self.function = function


def changed(value, keys, new):
    """A copy of the value with a change below `keys`."""
    if keys:
        own = list(value) if isinstance(value, list) else dict(value)
        if new is GONE and len(keys) == 1:
            del own[keys[0]]
        else:
            own[keys[0]] = changed(value[keys[0]], keys[1:], new)
        return own
    return new.function(value) if isinstance(new, Apply) else {**value, **new.members} if isinstance(new, Add) else new
