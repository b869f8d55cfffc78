"""`MPI.Group`: ordered sets of processes. A group stores the ranks of its members in the job."""

from collections.abc import Sequence
from operator import index

from . import constants as c
from .constant import by_name
from .errors import Exception, unsupported


class Group:
    """An ordered set of processes."""

    __slots__ = ("_members", "_own")

    def __new__(cls, group: "Group | None" = None) -> "Group":
        self = super().__new__(cls)
        self._members: tuple[int, ...] | None = None if group is None else group._members
        self._own: int = 0 if group is None else group._own
        return self

    @classmethod
    def _of(cls, members: Sequence[int], own: int) -> "Group":
        self = cls.__new__(cls)
        self._members, self._own = tuple(members), own
        return self

    def _valid(self) -> tuple[int, ...]:
        if self._members is None:
            raise Exception(c.ERR_GROUP)
        return self._members

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Group):
            return NotImplemented
        return self is other or self._members == other._members and not self._members

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return self._members is not None

    def __reduce__(self) -> tuple:
        if not self._members:
            return by_name("GROUP_NULL" if self._members is None else "GROUP_EMPTY")
        raise ValueError("cannot serialize groups")

    def Get_size(self) -> int:
        """Returns the number of members."""
        return len(self._valid())

    def Get_rank(self) -> int:
        """Returns the rank of this process in the group, or `UNDEFINED` if this process is not a member."""
        members = self._valid()
        return members.index(self._own) if self._own in members else c.UNDEFINED

    size = property(Get_size)
    rank = property(Get_rank)

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: "Group | None" = None) -> list[int]:
        """Converts ranks of this group (all ranks if `ranks` is None) to ranks of `group`, or to ranks in the job if `group` is
        None. The result is `UNDEFINED` for a process that is not in `group`."""
        members = self._valid()
        # Without a second group, convert to ranks in the job, which `members` contains.
        place = {m: m for m in members} if group is None else {m: i for i, m in enumerate(group._valid())}
        translated = []
        for rank in range(len(members)) if ranks is None else map(index, ranks):
            if rank == c.PROC_NULL:
                translated.append(c.PROC_NULL)
            elif 0 <= rank < len(members):
                translated.append(place.get(members[rank], c.UNDEFINED))
            else:
                raise Exception(c.ERR_RANK)
        return translated

    def Compare(self, group: "Group") -> int:
        """Returns `IDENT`, `SIMILAR` (same members in another order) or `UNEQUAL`."""
        ours, theirs = self._valid(), group._valid()
        return c.IDENT if ours == theirs else c.SIMILAR if set(ours) == set(theirs) else c.UNEQUAL

    def Dup(self) -> "Group":
        """Returns a copy."""
        return self._with_members(self._valid())

    def _with_members(self, members: Sequence[int]) -> "Group":
        return type(self)._of(members, self._own)

    @classmethod
    def Union(cls, group1: "Group", group2: "Group") -> "Group":
        """Returns a group of the members of the first group, followed by the members that only the second group has."""
        first = group1._valid()
        return cls._of(first + tuple(m for m in group2._valid() if m not in first), group1._own)

    @classmethod
    def Intersection(cls, group1: "Group", group2: "Group") -> "Group":
        """Returns a group of the members of both groups, in the order of the first group."""
        second = set(group2._valid())
        return cls._of([m for m in group1._valid() if m in second], group1._own)

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: "Group", group2: "Group") -> "Group":
        """Returns a group of the members of the first group that the second group does not have."""
        second = set(group2._valid())
        return cls._of([m for m in group1._valid() if m not in second], group1._own)

    def Incl(self, ranks: Sequence[int]) -> "Group":
        """Returns a group of the members `ranks`, in this order."""
        members = self._valid()
        return self._with_members([members[rank] for rank in self._checked(ranks)])

    def Excl(self, ranks: Sequence[int]) -> "Group":
        """Returns a group of all members except `ranks`."""
        without = set(self._checked(ranks))
        return self._with_members([m for rank, m in enumerate(self._valid()) if rank not in without])

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> "Group":
        """Returns a group of the members in ranges of ranks. A range is a first rank, a last rank (included) and a step."""
        return self.Incl(_ranks_in_ranges(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> "Group":
        """Returns a group of all members except the members in ranges of ranks."""
        return self.Excl(_ranks_in_ranges(ranks))

    def _checked(self, ranks: Sequence[int]) -> list[int]:
        numbers = [index(rank) for rank in ranks]
        if any(not 0 <= rank < len(self._valid()) for rank in numbers) or len(set(numbers)) != len(numbers):
            raise Exception(c.ERR_RANK, f"{numbers} are not different ranks of a group of {len(self._valid())}")
        return numbers

    @classmethod
    def Create_from_session_pset(cls, *_args: object, **_options: object) -> "Group":
        """Not supported."""
        raise unsupported("MPI.Group.Create_from_session_pset")

    def Free(self) -> None:
        """Makes this the null group."""
        self._valid()
        if self is not GROUP_EMPTY:
            self._members = None

    def free(self) -> None:
        """Calls `Free` if this is neither the null group nor `GROUP_EMPTY`."""
        if self and self is not GROUP_EMPTY:
            self.Free()


def _ranks_in_ranges(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    spread: list[int] = []
    for first, last, step in ranges:
        if step == 0:
            raise Exception(c.ERR_ARG)
        spread.extend(range(first, last + (1 if step > 0 else -1), step))
    return spread


GROUP_NULL = Group()
GROUP_EMPTY = Group._of((), 0)
