"""Names of MPI that ringtrain does not support. The names exist, and raise an error when a program uses them.

A test compares the table in the documentation with the list `UNSUPPORTED`."""

from collections.abc import Callable
from typing import Any

from .cartesian import Topocomm
from .communicator import Comm, Intracomm
from .datatypes import Datatype
from .errors import unsupported
from .groups import Group
from .info import Errhandler, Info
from .messages import Message
from .operations import Op
from .requests import Prequest, Request
from .status import Status

UNSUPPORTED: list[str] = ["Comm.Psend_init", "Comm.Precv_init", "Datatype.Create_darray", "Datatype.Pack_external"]
UNSUPPORTED += ["Datatype.Unpack_external", "Datatype.Pack_external_size", "Group.Create_from_session_pset"]

_HANDLES = "fromhandle toint fromint py2f f2py"
_ERRORS = "Create_errhandler Get_errhandler Set_errhandler Call_errhandler"
_ATTRIBUTES = "Get_attr Set_attr Delete_attr Create_keyval Free_keyval"

_CLASSES = {
    "Win": f"Create Allocate Allocate_shared Create_dynamic {_ATTRIBUTES} {_ERRORS} {_HANDLES} Accumulate Attach Compare_and_swap"
    " Complete Detach Fence Fetch_and_op Flush Flush_all Flush_local Flush_local_all Free Get Get_accumulate Get_group Get_info"
    " Get_name Lock Lock_all Post Put Raccumulate Rget Rget_accumulate Rput Set_info Set_name Shared_query Start Sync Test Unlock"
    " Unlock_all Wait free tomemory",
    "File": f"Open Delete {_ERRORS} {_HANDLES} Close Get_amode Get_atomicity Get_byte_offset Get_group Get_info Get_position"
    " Get_position_shared Get_size Get_type_extent Get_view Iread Iread_all Iread_at Iread_at_all Iread_shared Iwrite Iwrite_all"
    " Iwrite_at Iwrite_at_all Iwrite_shared Preallocate Read Read_all Read_all_begin Read_all_end Read_at Read_at_all"
    " Read_at_all_begin Read_at_all_end Read_ordered Read_ordered_begin Read_ordered_end Read_shared Seek Seek_shared"
    " Set_atomicity Set_info Set_size Set_view Sync Write Write_all Write_all_begin Write_all_end Write_at Write_at_all"
    " Write_at_all_begin Write_at_all_end Write_ordered Write_ordered_begin Write_ordered_end Write_shared free",
    "Session": f"Init {_ERRORS} {_HANDLES} Attach_buffer Create_group Detach_buffer Finalize Flush_buffer Get_info Get_nth_pset"
    " Get_num_psets Get_pset_info Iflush_buffer free",
    "Intercomm": "Create_from_groups Get_remote_group Get_remote_size Merge",
    "Graphcomm": "Get_dims Get_topo Get_neighbors_count Get_neighbors",
    "Distgraphcomm": "Get_dist_neighbors_count Get_dist_neighbors",
}
"""The classes that are not supported, and the names of their methods."""

_PROPERTIES = {
    "Win": "attrs flavor group group_rank group_size handle info model name",
    "File": "amode atomicity group group_rank group_size handle info size",
    "Session": "handle",
    "Intercomm": "remote_group remote_size",
    "Graphcomm": "dims edges index nedges neighbors nneighbors nnodes topo",
    "Distgraphcomm": "",
}

_METHODS: dict[type, str] = {
    Comm: f"{_HANDLES} handle Join Create_errhandler Iflush_buffer Revoke Is_revoked Get_failed Ack_failed Agree Iagree"
    " Shrink Ishrink",
    Intracomm: "Create_from_group Create_graph Create_dist_graph_adjacent Create_dist_graph Create_intercomm Graph_map Spawn"
    " Spawn_multiple Accept Connect",
    Datatype: f"{_HANDLES} handle {_ATTRIBUTES}",
    Request: f"{_HANDLES} handle",
    Prequest: "Pready Pready_range Pready_list Parrived",
    Status: "py2f f2py tomemory",
    **dict.fromkeys((Group, Info, Message, Op, Errhandler), f"{_HANDLES} handle"),
}
_FUNCTIONS = (
    "Open_port Close_port Publish_name Unpublish_name Lookup_name Register_datarep Iflush_buffer Get_abi_version Get_abi_info"
    " Get_abi_fortran_info Get_hw_resource_info"
)


def _raising(name: str) -> Callable[..., Any]:
    def method(*_args: Any, **_options: Any) -> Any:
        raise unsupported(f"MPI.{name}")

    method.__name__ = name.rpartition(".")[2]
    method.__qualname__ = name
    method.__doc__ = "Not supported."
    UNSUPPORTED.append(name)
    return method


def _class(name: str, bases: tuple[type, ...] = ()) -> type:
    members: dict[str, Any] = {method: staticmethod(_raising(f"{name}.{method}")) for method in _CLASSES[name].split()}
    members |= {attribute: property(_raising(f"{name}.{attribute}")) for attribute in _PROPERTIES[name].split()}
    members["__doc__"] = "Not supported: the null object is the only object of this class."
    if not bases:
        members["__bool__"] = lambda self: False
        members["__eq__"] = lambda self, other: type(self) is type(other)
        members["__hash__"] = None
        # A pickle contains only the name of the null object.
        members["__reduce__"] = lambda self: f"{name.upper()}_NULL"
    return type(name, bases, members)


WHOLE_CLASSES = tuple(_CLASSES)
Win, File, Session = _class("Win"), _class("File"), _class("Session")
Intercomm = _class("Intercomm", (Comm,))
Graphcomm, Distgraphcomm = _class("Graphcomm", (Topocomm,)), _class("Distgraphcomm", (Topocomm,))
WIN_NULL, FILE_NULL, SESSION_NULL, INTERCOMM_NULL = Win(), File(), Session(), Intercomm()

for _owner, _names in _METHODS.items():
    for _name in _names.split():
        _method = _raising(f"{_owner.__name__}.{_name}")
        # `handle` is an attribute and not a method, so reading it raises the error.
        setattr(_owner, _name, property(_method) if _name == "handle" else _method)

FUNCTIONS = {name: _raising(name) for name in _FUNCTIONS.split()}
