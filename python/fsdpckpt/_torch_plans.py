"""What the ranks of a save hold, and what each of them writes, from their plans."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ._errors import UsageError
from ._shards import Box, Value


class Held:
    """What the ranks hold, from their plans: values, and the boxes of each."""

    def __init__(self, plans: list[SavePlan]) -> None:
        self.values: list[Value] = []
        self.boxes: list[list[Box]] = []
        self.bytes = 0
        self._items: list[list[WriteItem]] = []  # next to boxes
        self._holders: list[list[tuple[int, WriteItem]]] = []  # of objects
        self._ranks = len(plans)
        numbers: dict[str, int] = {}
        planned = {item.index for plan in plans for item in plan.items}
        for rank, plan in enumerate(plans):
            self.bytes += sum(item.tensor_storage_size() or 0 for item in plan.items)
            own = {item.index: item for item in plan.storage_data or () if item.index in planned}
            own.update((item.index, item) for item in plan.items)
            for item in own.values():
                number = numbers.setdefault(item.index.fqn, len(numbers))
                if number == len(self.values):
                    self._add(_value(item, plan))
                self._hold(number, rank, item)

    def _add(self, value: Value) -> None:
        self.values.append(value)
        self.boxes.append([])
        self._items.append([])
        self._holders.append([])

    def _hold(self, number: int, rank: int, item: WriteItem) -> None:
        if item.tensor_data is None:
            self._holders[number].append((rank, item))
            return
        value, chunk = self.values[number], item.tensor_data.chunk
        if (_dtype(item), tuple(item.tensor_data.size)) != (value.dtype, value.shape):
            raise UsageError(f"tensor {value.name}: rank {rank} has another shape or dtype than the ranks before it")
        if all(chunk.sizes):
            self.boxes[number].append(Box(rank, tuple(chunk.offsets), tuple(chunk.sizes)))
            self._items[number].append(item)

    def take_all(self) -> tuple[list[list[WriteItem]], bool]:
        """`assign` for a format whose files have all that their rank holds, also what others hold."""
        items: list[list[WriteItem]] = [[] for _ in range(self._ranks)]
        for value, boxes, own, holders in zip(self.values, self.boxes, self._items, self._holders):
            for box, item in zip(boxes, own):
                items[box.rank].append(item)
            for rank, item in holders:
                items[rank].append(item)
            lacking = len(holders or boxes) < self._ranks and (value.dtype is None or (boxes and boxes[0].sizes == value.shape))
            if lacking:
                raise UsageError(
                    f"{value.name}: some ranks hold nothing of it, and in this format each rank has a file of its own: save it as "
                    "h5 or dcp"
                )
        return items, False

    def assign(self, stored: Sequence[Sequence[int]]) -> tuple[list[list[WriteItem]], bool]:
        """The items that each rank writes, and whether rank 0 must wait for objects of other ranks."""
        items: list[list[WriteItem]] = [[] for _ in range(self._ranks)]
        late = False
        for number, indices in enumerate(stored):
            for index in indices:
                items[self.boxes[number][index].rank].append(self._items[number][index])
            if self._holders[number]:
                rank, item = min(self._holders[number], key=lambda holder: holder[0])
                items[rank].append(item)
                late = late or rank > 0
        return items, late


class Plans:
    """With enable_plan_caching, a planner passes on only those plans that have changed since the last save."""

    def __init__(self) -> None:
        self._last: list[SavePlan] = []

    def complete(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(is_usable(plan) for plan in plans):
            if len(self._last) != len(plans):
                raise UsageError("the planner has cached plans of a save that HDF5Writer did not see")
            plans = [plan if is_usable(plan) else last for plan, last in zip(plans, self._last)]
        self._last = plans
        return plans


PLANS = Plans()


def is_usable(plan: SavePlan) -> bool:
    return bool(getattr(plan, "usable", True))  # torch 2.6 has no such attribute


def _value(item: WriteItem, plan: SavePlan) -> Value:
    name = item.index.fqn
    path = (plan.planner_data or {}).get(name) or (name,)
    elements = tuple((str(key), False) if isinstance(key, int) else key for key in path)
    if item.tensor_data is None:
        return Value(name, elements, None, ())
    return Value(name, elements, _dtype(item), tuple(item.tensor_data.size))


def _dtype(item: WriteItem) -> str | None:
    return str(item.tensor_data.properties.dtype).removeprefix("torch.") if item.tensor_data else None
