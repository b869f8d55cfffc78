"""What MPI has and ringtrain has not: names that exist, and say so when they are used.

`UNSUPPORTED` is the list that the documentation's table is checked against.
"""

from collections.abc import Callable
from typing import Any

from .communicator import Comm, Intracomm
from .datatypes import Datatype
from .errors import unsupported
from .requests import Prequest, Request

_MAKERS = {
    "Win": "Create Allocate Allocate_shared Create_dynamic Create_keyval Create_errhandler",
    "File": "Open Delete Create_errhandler",
    "Session": "Init Create_errhandler",
    "Intercomm": "Create_from_groups",
}
"""Classes that are not supported, and the methods by which programs get at objects of them."""

_HANDLES = "fromhandle toint fromint py2f f2py handle"
_METHODS: dict[type, str] = {
    Comm: f"{_HANDLES} Join Create_errhandler Iflush_buffer Revoke Is_revoked Get_failed Ack_failed Agree Iagree Shrink Ishrink",
    Intracomm: "Create_from_group Create_graph Create_dist_graph_adjacent Create_dist_graph Create_intercomm Graph_map Spawn"
    " Spawn_multiple Accept Connect",
    Datatype: f"{_HANDLES} Get_attr Set_attr Delete_attr Create_keyval Free_keyval",
    Request: _HANDLES,
    Prequest: "Pready Pready_range Pready_list Parrived",
}
_FUNCTIONS = (
    "Open_port Close_port Publish_name Unpublish_name Lookup_name Register_datarep Iflush_buffer Get_abi_version Get_abi_info"
    " Get_abi_fortran_info Get_hw_resource_info"
)

UNSUPPORTED: list[str] = ["Comm.Psend_init", "Comm.Precv_init", "Datatype.Create_darray", "Datatype.Pack_external"]
UNSUPPORTED += ["Datatype.Unpack_external", "Datatype.Pack_external_size", "Group.Create_from_session_pset"]


def _raising(name: str) -> Callable[..., Any]:
    def method(*_args: Any, **_options: Any) -> Any:
        raise unsupported(f"MPI.{name}")

    method.__name__ = name.rpartition(".")[2]
    method.__qualname__ = name
    method.__doc__ = "Not supported."
    UNSUPPORTED.append(name)
    return method


def _class(name: str, methods: str, bases: tuple[type, ...] = ()) -> type:
    members: dict[str, Any] = {method: staticmethod(_raising(f"{name}.{method}")) for method in methods.split()}
    members["__doc__"] = "Not supported: there are no objects of this class but the null one."
    if not bases:
        members["__bool__"] = lambda self: False
        members["__eq__"] = lambda self, other: type(self) is type(other)
        members["__hash__"] = None
    return type(name, bases, members)


Win, File, Session = (_class(name, _MAKERS[name]) for name in ("Win", "File", "Session"))
Intercomm = _class("Intercomm", _MAKERS["Intercomm"], (Comm,))
WIN_NULL, FILE_NULL, SESSION_NULL, INTERCOMM_NULL = Win(), File(), Session(), Intercomm()

for _owner, _names in _METHODS.items():
    for _name in _names.split():
        setattr(_owner, _name, _raising(f"{_owner.__name__}.{_name}"))

FUNCTIONS = {name: _raising(name) for name in _FUNCTIONS.split()}
